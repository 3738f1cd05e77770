// What a peer says on its queue pairs, and how they fail, while transfers and fences go on.
#include <cstring>

#include "base/clock.h"
#include "fuzz/rdma_peer.h"

namespace kvzc {
namespace {

constexpr std::size_t kOperations = 4;

// One put or get of a few runs, which may end at any time.
struct Moving {
  Operation operation;
  bool is_posted = false;
};

}  // namespace

KVZC_FUZZ_TARGET(rdma_message)(fuzz::Bytes input) {
  static fuzz::RdmaWorld world;
  fuzz::Host& host = world.host;
  const std::unique_ptr<Channel> channel = world.join();

  std::array<Moving, kOperations> moving;
  std::uint64_t sequence = 0;
  std::size_t taken = 0;
  fuzz::Input in(input);
  for (int steps = 0; steps < 64 && !in.is_at_end(); ++steps) {
    switch (in.u8() % 14) {
      case 0: {
        fuzz::Bytes bytes = in.part();
        bytes = bytes.first(std::min(bytes.size(), rdma::kMessageBytes));
        fuzz::deliver(in.u8() % fuzz::kDevices, bytes);
        break;
      }
      case 1:
      case 2: {
        // One that makes sense, in order.
        rdma::Message message;
        message.header.type = static_cast<rdma::MessageType>(in.u8() % 9);
        message.header.code = in.u8();
        message.header.rail = in.u8() % (fuzz::kDevices + 1);
        // Mostly no lie: those end it all.
        const std::uint8_t consumed = in.u8();
        message.header.consumed = consumed < 128 ? 0 : consumed;
        message.header.sequence = ++sequence;
        message.header.taken_tags = in.u8();
        const fuzz::Bytes body = in.part();
        message.header.body_bytes =
            static_cast<std::uint8_t>(std::min(body.size(), rdma::kMaxBodyBytes));
        std::copy_n(body.begin(), message.header.body_bytes, message.body);
        fuzz::deliver(in.u8() % fuzz::kDevices,
                      fuzz::Bytes(reinterpret_cast<const std::byte*>(&message), message.nbytes()));
        break;
      }
      case 3: {
        const std::size_t pair = in.u8() % fuzz::kDevices;
        fuzz::give_back(pair, in.u8(), true);
        break;
      }
      case 4:
        fuzz::give_back(in.u8() % fuzz::kDevices, 1, false);
        break;
      case 5:
      case 6: {
        const auto free = std::find_if(moving.begin(), moving.end(), [](const Moving& each) {
          return !each.is_posted || each.operation.state.has_ended();
        });
        if (free == moving.end()) break;
        Operation& operation = free->operation;
        const std::uint8_t how = in.u8();
        const bool has_tag = how % 2 != 0 && channel->take_credit(3).is_ok();
        operation.state.restart(1);
        operation.clear_failure();
        operation.direction = how % 4 < 2 ? Direction::kPut : Direction::kGet;
        operation.has_tag = has_tag;
        operation.tag.nbytes = 3;
        std::memcpy(operation.tag.bytes, "tag", 3);
        operation.fence = {in.u8() % 4u, in.u8() % 4u};
        operation.runs.clear();
        operation.segments.clear();
        operation.nbytes = 0;
        std::uint64_t at = 0;
        for (unsigned left = in.u8() % 8; left > 0; --left) {
          at += in.u8();
          const std::uint64_t nbytes = in.u16() % 4096 + 1u;
          operation.runs.push_back({world.local.data() + at, at, nbytes});
          operation.nbytes += nbytes;
          at += nbytes;
        }
        const auto runs = static_cast<std::uint32_t>(operation.runs.size());
        if (runs > 0) operation.segments.push_back({0, runs, world.remote.get(), world.piece});
        operation.channel = nullptr;
        free->is_posted = true;
        channel->post(operation);
        break;
      }
      case 7:
        channel->drain();
        break;
      case 8:
        if (taken < host.arrivals.size()) {
          ++taken;
          channel->grant_credits(1);
        }
        break;
      case 9:
        if (!channel->take_credit(3).is_ok()) {
          channel->wait_for_credit(3, 1);
        } else if (in.u8() % 2 == 0) {
          channel->send_tag(Tag{}, Code::kOk);
        } else {
          channel->return_credit(3);
        }
        break;
      case 10: {
        const FenceTicket ticket{in.u8() % 4u, in.u8() % 4u};
        (void)channel->look_at_grant(ticket);
        (void)channel->fence({&ticket, 1}, 0);
        break;
      }
      case 11: {
        Moving& which = moving[in.u8() % kOperations];
        if (!which.is_posted || which.operation.state.has_ended()) break;
        which.operation.fail(Status(Code::kCancelled, "cancelled"));
        channel->abort(which.operation);
        break;
      }
      case 12:
        if (in.u8() % 2 == 0) fuzz::take_port_down(in.u8() % fuzz::kDevices);
        fuzz::refuse_after(in.u8() % 8);
        break;
      default:
        (void)channel->explain(*world.remote);
        (void)channel->is_quiet();
    }
  }
  // However it was left: it ends, all that was posted ends with it, and nothing more comes in.
  channel->lose(Status(Code::kClosed, "the end"), PeerFate::kUnknown);
  KVZC_FUZZ_CHECK(channel->cut_off(now_ns() + 20'000'000'000).is_ok());
  for (const Moving& each : moving) {
    // Another thread may be about to say so.
    const auto is_over = [&each] { return !each.is_posted || each.operation.state.has_ended(); };
    for (int looks = 0; looks < 20'000 && !is_over(); ++looks) usleep(1000);
    KVZC_FUZZ_CHECK(is_over());
  }
  KVZC_FUZZ_CHECK(channel->is_quiet());
  KVZC_FUZZ_CHECK(host.arrivals.size() <= fuzz::RdmaWorld::kDepth + taken);
}

}  // namespace kvzc

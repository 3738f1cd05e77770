// A peer that says one thing again and again, and takes nothing: it is lost before that costs much.
#include <cstring>

#include "base/clock.h"
#include "fuzz/rdma_peer.h"

namespace kvzc {
namespace {

constexpr std::uint32_t kMany = 150'000;  // Above the bound of questions without an answer.

}  // namespace

KVZC_FUZZ_TARGET(rdma_flood)(fuzz::Bytes input) {
  static fuzz::RdmaWorld world;
  const std::unique_ptr<Channel> channel = world.join();
  fuzz::Input in(input);
  rdma::Message message;
  message.header.type = static_cast<rdma::MessageType>(in.u8() % 9);
  const std::uint64_t step = std::uint64_t{1} << in.u8() % 24;
  message.header.consumed = in.u8();
  const std::uint8_t slots = in.u8();  // How far the next message's grant lies from this one's.
  message.header.body_bytes = static_cast<std::uint8_t>(in.u8() % (rdma::kMaxBodyBytes + 1));
  message.header.sequence = 1;
  const bool is_taken_for_a_lie = step > (1u << 20) || message.header.consumed > 0;
  const bool asks = message.header.type == rdma::MessageType::kFenceAsk;
  for (std::uint32_t i = 0; i < kMany && channel->lost().is_ok(); ++i) {
    const std::uint32_t slot = i << (slots % 16);
    std::memcpy(message.body + 8, &slot, sizeof slot);
    fuzz::deliver(i % fuzz::kDevices,
                  fuzz::Bytes(reinterpret_cast<const std::byte*>(&message), message.nbytes()));
    message.header.sequence += step;
    if (i % 64 == 0) channel->drain();
  }
  const bool is_lost = !channel->lost().is_ok();
  if (asks || is_taken_for_a_lie) KVZC_FUZZ_CHECK(is_lost);
  KVZC_FUZZ_CHECK(world.host.arrivals.size() <= fuzz::RdmaWorld::kDepth);
  channel->lose(Status(Code::kClosed, "the end"), PeerFate::kUnknown);
  KVZC_FUZZ_CHECK(channel->cut_off(now_ns() + 20'000'000'000).is_ok());
}

}  // namespace kvzc

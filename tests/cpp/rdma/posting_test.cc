// A device that refuses a work request, and queues that are short: each transfer ends once, as what
// it is, and none is carried out twice.

#include <errno.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "rdma/lies_test.h"

namespace kvzc::lies {
namespace {

// --- COMP-02, COMP-08, REG-06: the k-th work request of a transfer is refused ---

class RefusedTest : public LiesTest {
 protected:
  static constexpr std::uint64_t kPiece = 4096;
  static constexpr std::int64_t kPieces = 4;
  static constexpr std::uint64_t kBytes = kPiece * kPieces;

  struct Seen {
    Status end;
    std::vector<std::byte> target, before, expected;
    // What came with the put's tag; nothing: the owner has heard that the writer is lost.
    std::optional<Code> tag;
  };

  // One transfer of kPieces work requests, and of one more for the tag of a put; the device takes
  // `taken` of them.
  Seen refuse(Direction direction, std::int64_t taken) {
    Seen out;
    const OwnedMemory memory = own(kBytes, 1);
    const RemoteView remote = open_handle(memory.handle_text());
    std::vector<std::byte> local_bytes(kBytes);
    fill(local_bytes.data(), kBytes, 2);
    {
      const LocalView local = view_of(*writer_, local_bytes.data(), kBytes);
      TransferOptions options;
      options.notify = "hello";
      EXPECT_TRUE(writer_->try_notify(remote, options)->wait(in_seconds(20)).is_ok());
      const auto peer = owner_->wait_arrivals("hello", 1, nullptr, in_seconds(20)).take()[0].peer;
      connect(remote);
      options.notify = "put";
      if (direction == Direction::kGet) options.notify.reset();
      device("writer:rxe0").takes_requests = taken;
      device("writer:rxe0").refuses_request = ENOMEM;
      out.before.assign(kBytes, {});
      const bool is_put = direction == Direction::kPut;
      std::memcpy(out.before.data(), is_put ? memory.data() : local_bytes.data(), kBytes);
      out.expected.assign(kBytes, {});
      fill(out.expected.data(), kBytes, is_put ? 2 : 1);
      out.end = move(*writer_, direction, local, remote, options);
      EXPECT_EQ(device("writer:rxe0").refuses_request, 0) << "nothing was refused";
      if (is_put) {
        const auto heard = owner_->wait_arrivals("put", 1, peer.get(), in_seconds(20));
        if (heard.is_ok()) {
          out.tag = (*heard)[0].code;
        } else {
          EXPECT_EQ(heard.status().code(), Code::kPeerLost) << heard.status().to_string();
        }
        for (const Arrival& each : owner_->poll_arrivals(100)) {
          ADD_FAILURE() << "a tag came twice: " << each.tag;
        }
      }
      out.target.assign(kBytes, {});
      std::memcpy(out.target.data(), is_put ? memory.data() : local_bytes.data(), kBytes);
      const EngineStats stats = writer_->stats();
      EXPECT_EQ(stats.transfers_running, 0u);
      EXPECT_EQ(stats.transfers_done + stats.transfers_failed + stats.transfers_cancelled, 3u);
    }
    OwnedMemory last = memory;
    EXPECT_TRUE(last.region.close(in_seconds(20)).is_ok());
    return out;
  }

  static void make_pieces_small(EngineOptions& options) {
    options.rdma.most_request_bytes = kPiece;
  }

  void on_the_only_rail(Direction direction) {
    const std::int64_t last = direction == Direction::kPut ? kPieces : kPieces - 1;
    for (std::int64_t taken = 0; taken <= last; ++taken) {
      SCOPED_TRACE("taken: " + std::to_string(taken));
      open(kOneRail, make_pieces_small);
      const Seen seen = refuse(direction, taken);
      // With its only rail gone the peer is lost; what it got then is whole pieces.
      EXPECT_EQ(seen.end.code(), Code::kPeerLost) << seen.end.to_string();
      EXPECT_HAS(seen.end.text(), "rxe0");
      EXPECT_NE(seen.tag, Code::kOk) << "told as done, and it failed";
      for (std::uint64_t at = 0; at < kBytes; at += kPiece) {
        EXPECT_TRUE(std::memcmp(&seen.target[at], &seen.before[at], kPiece) == 0 ||
                    std::memcmp(&seen.target[at], &seen.expected[at], kPiece) == 0)
            << "piece " << at / kPiece;
      }
      close();
      stop_lying();
    }
  }

  void on_one_of_two_rails(Direction direction) {
    const std::int64_t last = direction == Direction::kPut ? kPieces : kPieces - 1;
    for (std::int64_t taken = 0; taken <= last; ++taken) {
      SCOPED_TRACE("taken: " + std::to_string(taken));
      open(kTwoRails, make_pieces_small);
      const Seen seen = refuse(direction, taken);
      EXPECT_TRUE(seen.end.is_ok()) << seen.end.to_string();
      EXPECT_EQ(seen.target, seen.expected);
      if (direction == Direction::kPut) {
        EXPECT_EQ(seen.tag, Code::kOk);
      }
      close();
      stop_lying();
    }
  }
};

TEST_F(RefusedTest, PutOnTheOnlyRailFailsAndEverybodyHears) { on_the_only_rail(Direction::kPut); }
TEST_F(RefusedTest, GetOnTheOnlyRailFails) { on_the_only_rail(Direction::kGet); }
TEST_F(RefusedTest, PutOnOneRailGoesByTheOther) { on_one_of_two_rails(Direction::kPut); }
TEST_F(RefusedTest, GetOnOneRailGoesByTheOther) { on_one_of_two_rails(Direction::kGet); }

// A rail that breaks after the peer took a message and before that was acknowledged: it is sent again on
// the other, and counts once.
class AgainTest : public LiesTest {};

TEST_F(AgainTest, ATagThatTheOwnerHasAlreadyIsNotToldTwice) {
  open(kTwoRails);
  OwnedMemory memory = own(4096, 1);
  {
    const RemoteView remote = open_handle(memory.handle_text());
    connect(remote);
    std::vector<std::byte> bytes(4096);
    const LocalView local = view_of(*writer_, bytes.data(), bytes.size());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(put(local, remote).is_ok());
    fill(bytes.data(), bytes.size(), 2);
    TransferOptions options;
    options.notify = "once";
    device("writer:rxe0").disowns_messages = 1;
    const Status end = move(*writer_, Direction::kPut, local, remote, options);
    EXPECT_TRUE(end.is_ok()) << end.to_string();
    EXPECT_EQ(device("writer:rxe0").disowns_messages, 0) << "no rail broke";
    EXPECT_TRUE(owner_->wait_arrivals("once", 1, nullptr, in_seconds(20)).is_ok());
    EXPECT_EQ(first_difference(memory.data(), 4096, 2), -1);
    // Whatever was sent before this is there before it.
    options.notify = "last";
    EXPECT_TRUE(move(*writer_, Direction::kPut, local, remote, options).is_ok());
    EXPECT_TRUE(owner_->wait_arrivals("last", 1, nullptr, in_seconds(20)).is_ok());
    EXPECT_TRUE(owner_->poll_arrivals(100).empty()) << "a tag came twice";
    EXPECT_EQ(owner_->stats().arrivals_arrived, 2u);
  }
  EXPECT_TRUE(memory.region.close(in_seconds(20)).is_ok());
}

// --- COMP-09, COMP-10: queues as short as they get ---

class ShortQueueTest : public LiesTest {
 protected:
  static constexpr int kThreads = 4;
  static constexpr int kEach = 500;
  static constexpr int kAtOnce = 100;  // More than the queue holds, of all of them.
  static constexpr std::uint64_t kSmall = 64;

  void many(Direction direction) {
    // Room for one queue pair, and not for one more.
    device("writer:rxe0").max_cqe = 255;
    open(kOneRail, [](EngineOptions& options) { options.rdma.queue_depth = 1; });
    constexpr std::uint64_t kBytes = kSmall * kThreads * kEach;
    const OwnedMemory memory = own(kBytes, 1);
    const RemoteView remote = open_handle(memory.handle_text());
    connect(remote);
    std::vector<std::byte> local_bytes(kBytes);
    fill(local_bytes.data(), kBytes, 2);
    const LocalView local = view_of(*writer_, local_bytes.data(), kBytes);
    const std::uint64_t before = writer_->stats().transfers_done;
    std::atomic<int> good{0};
    const auto work = [&](int thread) {
      std::vector<Transfer> running;
      for (int i = 0; i < kEach; ++i) {
        const auto begin = static_cast<std::int64_t>(kSmall) * (thread * kEach + i);
        const LocalView from = slice(local, begin, begin + static_cast<std::int64_t>(kSmall));
        const RemoteView to = slice(remote, begin, begin + static_cast<std::int64_t>(kSmall));
        const TransferItem item{&from, &to};
        running.push_back((direction == Direction::kPut
                               ? writer_->put({&item, 1}, {}, in_seconds(20))
                               : writer_->get({&item, 1}, {}, in_seconds(20)))
                              .take());
        if (running.size() < kAtOnce && i + 1 < kEach) continue;
        for (const Transfer& each : running) {
          if (each.wait(in_seconds(20)).is_ok() && each.status().is_ok()) ++good;
        }
        running.clear();
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
    for (std::thread& each : threads) each.join();
    EXPECT_EQ(good, kThreads * kEach);
    EXPECT_EQ(writer_->stats().transfers_done - before,
              static_cast<std::uint64_t>(kThreads * kEach));
    EXPECT_EQ(writer_->stats().transfers_running, 0u);
    // Carried out once each: back-pressure is not trying again.
    EXPECT_EQ(device("writer:rxe0").writes + device("writer:rxe0").reads,
              static_cast<std::uint64_t>(kThreads * kEach));
    if (direction == Direction::kPut) {
      EXPECT_EQ(first_difference(memory.data(), kBytes, 2), -1);
    } else {
      EXPECT_EQ(first_difference(local_bytes.data(), kBytes, 1), -1);
    }
  }
};

TEST_F(ShortQueueTest, ThousandsOfPutsAreEachDoneOnce) { many(Direction::kPut); }
TEST_F(ShortQueueTest, ThousandsOfGetsAreEachDoneOnce) { many(Direction::kGet); }

}  // namespace
}  // namespace kvzc::lies

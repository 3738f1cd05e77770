// Each accepted transfer ends exactly once, and waiting for it always ends.
#include <algorithm>
#include <cstring>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class CompletionTest : public Conformance {
 protected:
  // Runs `writer` against an owner that only offers memory.
  void run_writer(std::uint64_t nbytes,
                  const std::function<void(Party&, Engine&, const RemoteView&)>& writer) {
    run(
        [&](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, nbytes);
          party.tell(memory.handle_text());
          party.hear();
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          writer(party, *engine, open_handle(party.hear()));
          party.tell("done");
        });
  }
};

TEST_P(CompletionTest, EveryTransferOfManyThreadsEndsOnceAndIsCounted) {
  constexpr int kThreads = 4;
  const int per_thread = rounds(8000);
  constexpr std::int64_t kBytes = 20'000;
  constexpr int kBatch = 16;
  run_writer(kThreads * kBatch * kBytes, [&](Party&, Engine& engine, const RemoteView& target) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(engine, source.data(), kBytes);
        std::vector<Transfer> transfers;
        for (int i = 0; i < per_thread; ++i) {
          const std::int64_t size = i % 3 == 0 ? 8 : kBytes;
          const LocalView from = slice(view, 0, size);
          // No two that run at the same time write the same bytes: that would have no order.
          const std::int64_t at = (t * kBatch + i % kBatch) * kBytes;
          const RemoteView to = slice(target, at, at + size);
          const TransferItem item{&from, &to};
          Result<Transfer> transfer = engine.put({&item, 1}, {}, in_seconds(30));
          ASSERT_TRUE(transfer.is_ok()) << transfer.status().to_string();
          transfers.push_back(transfer.take());
          // Wait in batches, from the last to the first, so that most have ended unobserved.
          if (transfers.size() < kBatch) continue;
          while (!transfers.empty()) {
            ASSERT_TRUE(transfers.back().wait(in_seconds(30)).is_ok());
            ASSERT_TRUE(transfers.back().status().is_ok());
            ASSERT_GT(transfers.back().done_ns(), 0);
            transfers.pop_back();
          }
        }
        ASSERT_TRUE(wait_for(transfers, WaitFor::kAll, in_seconds(30)).is_ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
    const EngineStats stats = engine.stats();
    EXPECT_EQ(stats.transfers_done, static_cast<std::uint64_t>(kThreads * per_thread));
    EXPECT_EQ(stats.transfers_failed + stats.transfers_cancelled, 0u);
    EXPECT_EQ(stats.transfers_running, 0u);
    const auto small = static_cast<std::uint64_t>((per_thread + 2) / 3);
    const std::uint64_t large = static_cast<std::uint64_t>(per_thread) - small;
    EXPECT_EQ(stats.bytes_done, kThreads * (small * 8 + large * kBytes));
  });
}

TEST_P(CompletionTest, ADroppedTransferRunsToItsEnd) {
  constexpr std::uint64_t kBytes = 8 << 20;
  run_writer(kBytes, [&](Party&, Engine& engine, const RemoteView& target) {
    {
      auto source = std::make_shared<std::vector<std::byte>>(kBytes);
      TensorSpec spec;
      spec.shape = {kBytes};
      spec.strides_bytes = {1};
      spec.data = spec.storage_data = source->data();
      spec.storage_nbytes = kBytes;
      spec.keep_alive = source;  // The transfer alone keeps the source alive.
      source.reset();
      const LocalView view = engine.find_or_borrow(spec).take();
      spec.keep_alive.reset();
      const TransferItem item{&view, &target};
      ASSERT_TRUE(engine.put({&item, 1}, {}, in_seconds(30)).is_ok());
    }
    const std::int64_t patience = in_seconds(30);
    while (engine.stats().transfers_done == 0 && in_seconds(0) < patience)
      std::this_thread::yield();
    EXPECT_EQ(engine.stats().transfers_done, 1u);
  });
}

TEST_P(CompletionTest, WaitingTwiceAndFromManyThreadsGivesTheSameEnd) {
  constexpr std::uint64_t kBytes = 16 << 20;
  run_writer(kBytes, [&](Party&, Engine& engine, const RemoteView& target) {
    std::vector<std::byte> source(kBytes);
    const LocalView view = view_of(engine, source.data(), kBytes);
    const std::int64_t at_most = in_seconds(15);
    for (int round = 0; round < 5; ++round) {
      const TransferItem item{&view, &target};
      const Transfer transfer = engine.put({&item, 1}, {}, in_seconds(30)).take();
      std::vector<std::thread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&transfer] {
          const Transfer copy = transfer;
          EXPECT_TRUE(copy.wait(in_seconds(30)).is_ok());
          EXPECT_TRUE(copy.status().is_ok());
        });
      }
      for (std::thread& thread : threads) thread.join();
      EXPECT_TRUE(transfer.wait(in_seconds(0)).is_ok());
    }
    EXPECT_LT(in_seconds(0), at_most);  // Woken, not timed out.
  });
}

TEST_P(CompletionTest, AWaitThatRunsOutLeavesTheTransferRunning) {
  const std::uint64_t kBytes = large(256 << 20);
  run_writer(kBytes, [&](Party&, Engine& engine, const RemoteView& target) {
    std::vector<std::byte> source(kBytes);
    const LocalView view = view_of(engine, source.data(), kBytes);
    const TransferItem item{&view, &target};
    const Transfer transfer = engine.put({&item, 1}, {}, in_seconds(30)).take();
    const Status early = transfer.wait(in_seconds(0));
    EXPECT_TRUE(early.is_ok() || early.code() == Code::kTimedOut) << early.to_string();
    ASSERT_TRUE(transfer.wait(in_seconds(60)).is_ok());
    EXPECT_TRUE(transfer.status().is_ok());
  });
}

TEST_P(CompletionTest, CancelReturnsWhenNotOneMoreByteMoves) {
  const int count = rounds(20);
  constexpr std::uint64_t kBytes = 32 << 20;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBytes);
        party.tell(memory.handle_text());
        for (int round = 0; round < count; ++round) {
          party.hear();
          // The writer says that it is quiet: nothing may change from here on.
          const std::vector<std::byte> seen(memory.data(), memory.data() + kBytes);
          party.tell("copied");
          party.hear();
          ASSERT_EQ(std::memcmp(seen.data(), memory.data(), kBytes), 0) << "round " << round;
          party.tell("next");
        }
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(*engine, source.data(), kBytes);
        int cancelled = 0;
        for (int round = 0; round < count; ++round) {
          std::fill(source.begin(), source.end(), static_cast<std::byte>(round));
          const TransferItem item{&view, &target};
          const Transfer transfer = engine->put({&item, 1}, {}, in_seconds(30)).take();
          std::this_thread::sleep_for(std::chrono::microseconds(round * 50));
          ASSERT_TRUE(transfer.cancel(in_seconds(30)).is_ok());
          ASSERT_TRUE(transfer.has_ended());
          const Code code = transfer.status().code();
          ASSERT_TRUE(code == Code::kOk || code == Code::kCancelled);
          if (code == Code::kCancelled) ++cancelled;
          // If anything still copied, this is what it would copy.
          std::fill(source.begin(), source.end(), std::byte{0xdd});
          party.meet();
          party.meet();
        }
        EXPECT_EQ(engine->stats().transfers_cancelled, static_cast<std::uint64_t>(cancelled));
        EXPECT_EQ(engine->stats().transfers_running, 0u);
      });
}

TEST_P(CompletionTest, CancellingWhatHasEndedReturnsAtOnce) {
  run_writer(4096, [&](Party&, Engine& engine, const RemoteView& target) {
    std::vector<std::byte> source(4096);
    const LocalView view = view_of(engine, source.data(), source.size());
    const TransferItem item{&view, &target};
    const Transfer transfer = engine.put({&item, 1}, {}, in_seconds(30)).take();
    ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
    const std::int64_t at_most = in_seconds(2);
    EXPECT_TRUE(transfer.cancel(in_seconds(5)).is_ok());
    EXPECT_LT(in_seconds(0), at_most);
    EXPECT_TRUE(transfer.status().is_ok()) << transfer.status().to_string();
  });
}

TEST_P(CompletionTest, ACancelledTransferBeginsNothingMore) {
  const int count = rounds(5);
  const std::uint64_t kBytes = large(256 << 20);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBytes);
        party.tell(memory.handle_text());
        for (int round = 0; round < count; ++round) {
          party.hear();
          // The whole takes many milliseconds, the cancel came at once.
          const auto moved =
              std::count(memory.data(), memory.data() + kBytes, static_cast<std::byte>(round + 1));
          ASSERT_LT(moved, static_cast<std::ptrdiff_t>(kBytes / 2)) << "round " << round;
          party.tell("next");
        }
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes, std::byte{1});
        const LocalView view = view_of(*engine, source.data(), kBytes);
        ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
        for (int round = 0; round < count; ++round) {
          std::fill(source.begin(), source.end(), static_cast<std::byte>(round + 1));
          const TransferItem item{&view, &target};
          const Transfer transfer = engine->put({&item, 1}, {}, in_seconds(30)).take();
          ASSERT_TRUE(transfer.cancel(in_seconds(30)).is_ok());
          ASSERT_EQ(transfer.status().code(), Code::kCancelled);
          party.meet();
        }
      });
}

KVZC_CONFORMANCE(CompletionTest);

}  // namespace
}  // namespace kvzc::conformance

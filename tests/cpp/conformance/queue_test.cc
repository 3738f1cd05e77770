// A completion queue gives each end once, over every transport, and may go away at any moment.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "conformance/peer_group.h"
#include "kvzc/completion_queue.h"
#include "kvzc/plan.h"

namespace kvzc::conformance {
namespace {

class QueueTest : public Conformance {
 protected:
  void run_writer(std::uint64_t nbytes,
                  const std::function<void(Engine&, const RemoteView&)>& writer) {
    run(
        [&](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, nbytes);
          party.tell(memory.handle_text());
          party.hear();
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          writer(*engine, open_handle(party.hear()));
          party.tell("done");
        });
  }
};

// Puts bytes [at, at + size), its end to `queue` under `number`.
Transfer put_into(CompletionQueue& queue, Engine& engine, const LocalView& from,
                  const RemoteView& to, int number) {
  Result<CompletionQueue::Place> place = queue.reserve();
  while (place.status().code() == Code::kWouldBlock) {
    queue.wait_for_room(in_seconds(1));
    place = queue.reserve();
  }
  const TransferItem item{&from, &to};
  Result<Transfer> transfer = engine.put({&item, 1}, {}, in_seconds(60));
  EXPECT_TRUE(transfer.is_ok()) << transfer.status().to_string();
  if (!transfer.is_ok()) return {};
  if (place.is_ok()) place.take().fill(*transfer, std::make_shared<int>(number));
  return transfer.take();
}

TEST_P(QueueTest, EveryEndOfManyThreadsIsAnEntryOnce) {
  constexpr int kThreads = 3;
  const int per_thread = rounds(2000);
  constexpr std::int64_t kBytes = 40'000;
  constexpr int kSlots = 4;  // Of each thread: those under way write where no other writes.
  run_writer(kThreads * kSlots * kBytes, [&](Engine& engine, const RemoteView& target) {
    const auto queue = CompletionQueue::create(16).take();
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(engine, source.data(), kBytes);
        std::vector<Transfer> under_way(kSlots);
        for (int i = 0; i < per_thread; ++i) {
          const int slot = i % kSlots;
          Transfer& last = under_way[static_cast<std::size_t>(slot)];
          if (last.is_valid()) {
            ASSERT_TRUE(last.wait(in_seconds(60)).is_ok());
          }
          const std::int64_t size = i % 3 == 0 ? kBytes : 8;
          const std::int64_t at = (t * kSlots + slot) * kBytes;
          last = put_into(*queue, engine, slice(view, 0, size), slice(target, at, at + size),
                          t * per_thread + i);
        }
        std::erase_if(under_way, [](const Transfer& each) { return !each.is_valid(); });
        ASSERT_TRUE(wait_for(under_way, WaitFor::kAll, in_seconds(60)).is_ok());  // The source goes.
      });
    }
    std::vector<bool> seen(static_cast<std::size_t>(kThreads * per_thread));
    for (std::size_t count = 0; count < seen.size();) {
      auto entries = queue->wait(7, in_seconds(60));
      ASSERT_TRUE(entries.is_ok()) << entries.status().to_string();
      for (const CompletionQueue::Entry& entry : *entries) {
        ASSERT_TRUE(entry.transfer.has_ended());
        ASSERT_TRUE(entry.transfer.status().is_ok()) << entry.transfer.status().to_string();
        const auto number = static_cast<std::size_t>(*static_cast<int*>(entry.label.get()));
        ASSERT_FALSE(seen[number]) << number << " came twice";
        seen[number] = true;
        ++count;
      }
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(queue->poll(1)->empty());
    EXPECT_EQ(queue->running() + queue->ended(), 0u);
  });
}

TEST_P(QueueTest, ClosesWhileItsTransfersEnd) {
  constexpr std::int64_t kBytes = 200'000;
  run_writer(kBytes, [&](Engine& engine, const RemoteView& target) {
    std::vector<std::byte> source(kBytes);
    const LocalView view = view_of(engine, source.data(), kBytes);
    for (int round = 0; round < rounds(300); ++round) {
      auto queue = CompletionQueue::create(8).take();
      std::atomic<bool> is_closed{false};
      std::thread closer([&] {
        while (queue->running() + queue->ended() == 0) std::this_thread::yield();
        if (round % 2 == 0) queue->close();
        is_closed = true;
      });
      std::vector<Transfer> transfers;
      for (int i = 0; i < 4; ++i) {
        const std::int64_t size = i % 2 == 0 ? kBytes / 4 : 64;
        const std::int64_t at = i * (kBytes / 4);
        transfers.push_back(put_into(*queue, engine, slice(view, at, at + size),
                                     slice(target, at, at + size), i));
      }
      closer.join();
      ASSERT_TRUE(is_closed);
      queue.reset();  // With transfers that run, or have ended and were not taken.
      ASSERT_TRUE(wait_for(transfers, WaitFor::kAll, in_seconds(60)).is_ok());
      for (const Transfer& each : transfers) ASSERT_TRUE(each.status().is_ok());
    }
  });
}

TEST_P(QueueTest, ItsDescriptorTellsOfAnEnd) {
  constexpr std::int64_t kBytes = 1 << 20;
  run_writer(3 * kBytes, [&](Engine& engine, const RemoteView& target) {
    std::vector<std::byte> source(kBytes);
    const LocalView view = view_of(engine, source.data(), kBytes);
    auto queue = CompletionQueue::create(8).take();
    pollfd look{queue->fd().take(), POLLIN, 0};
    ASSERT_EQ(poll(&look, 1, 0), 0);
    for (int i = 0; i < 3; ++i) {
      (void)put_into(*queue, engine, view, slice(target, i * kBytes, (i + 1) * kBytes), i);
    }
    // Nobody waits or helps: whoever sleeps on the descriptor counts as asleep.
    for (int count = 0; count < 3;) {
      ASSERT_EQ(poll(&look, 1, 60'000), 1);
      count += static_cast<int>(queue->poll(10)->size());
    }
    EXPECT_EQ(poll(&look, 1, 0), 0);
  });
}

TEST_P(QueueTest, APlanMovesBlocksByItself) {
  constexpr std::int64_t kBlocks = 64, kBlockBytes = 4096;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBlocks * kBlockBytes);
        party.tell(memory.handle_text());
        party.hear();
        for (std::int64_t i = 0; i < kBlocks; ++i) {
          const auto first = std::to_integer<int>(memory.data()[i * kBlockBytes]);
          EXPECT_EQ(first, i % 2 == 1 ? static_cast<int>(kBlocks - 1 - i) : 0) << i;
        }
        party.tell("seen");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBlocks * kBlockBytes);
        for (std::int64_t i = 0; i < kBlocks; ++i) {
          source[static_cast<std::size_t>(i * kBlockBytes)] = static_cast<std::byte>(i);
        }
        LocalView view = view_of(*engine, source.data(), source.size());
        for (View* each : {&view.view, &target.view}) {
          each->tensors[0].axes = {{kBlocks, kBlockBytes, nullptr}, {kBlockBytes, 1, nullptr}};
        }
        const auto plan = Plan::create(view, target, 0);
        ASSERT_TRUE(plan.is_ok()) << plan.status().to_string();
        std::vector<std::int64_t> from, to;
        for (std::int64_t i = 1; i < kBlocks; i += 2) {
          to.push_back(i);
          from.push_back(kBlocks - 1 - i);
        }
        const std::uint32_t layer = 0;
        Result<Transfer> moved = (*plan)->try_move(*engine, Direction::kPut, {from, to, {&layer, 1}}, {});
        ASSERT_TRUE(moved.is_ok()) << moved.status().to_string();
        ASSERT_TRUE(moved->wait(in_seconds(60)).is_ok());
        EXPECT_TRUE(moved->status().is_ok()) << moved->status().to_string();
        party.tell("moved");
        party.hear();
      });
}

KVZC_CONFORMANCE(QueueTest);

}  // namespace
}  // namespace kvzc::conformance

// TransferState: one end, told to whoever watches before or after it.
#include "kvzc/completion.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace kvzc {
namespace {

TEST(TransferState, TheFirstEndStays) {
  TransferState state;
  state.restart(1);
  EXPECT_FALSE(state.has_ended());
  EXPECT_EQ(state.done_ns(), 0);
  EXPECT_TRUE(state.end(Status(Code::kRevoked, "first"), 2));
  EXPECT_FALSE(state.end(Status::ok(), 3));
  EXPECT_TRUE(state.has_ended());
  EXPECT_EQ(state.status().code(), Code::kRevoked);
  EXPECT_EQ(state.done_ns(), 2);
}

TEST(TransferState, OfManyEndsAtOnceOneCounts) {
  for (int round = 0; round < 200; ++round) {
    TransferState state;
    state.restart(1);
    std::atomic<int> firsts{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] { firsts += state.end(Status::ok(), 10 + t) ? 1 : 0; });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(firsts.load(), 1);
  }
}

TEST(TransferState, WatchersAreFiredAtTheEndAndAfterIt) {
  TransferState state;
  state.restart(1);
  Waker early[3], gone, late;
  WakerWatch watches[3] = {WakerWatch(early[0]), WakerWatch(early[1]), WakerWatch(early[2])};
  WakerWatch gone_watch(gone), late_watch(late);
  for (int i = 0; i < 3; ++i) {
    watches[i].waker = &early[i];
    state.watch(watches[i]);
  }
  state.watch(gone_watch);
  state.unwatch(gone_watch);
  EXPECT_FALSE(early[0].has_fired());
  EXPECT_TRUE(state.end(Status::ok(), 2));
  for (const Waker& waker : early) EXPECT_TRUE(waker.has_fired());
  EXPECT_FALSE(gone.has_fired());
  state.watch(late_watch);
  EXPECT_TRUE(late.has_fired());
}

}  // namespace
}  // namespace kvzc

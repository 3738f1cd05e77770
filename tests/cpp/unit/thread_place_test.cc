#include "base/thread_place.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/traffic.h"
#include "gtest/gtest.h"
#include "unit/unit_support.h"

namespace kvzc {
namespace {

// Runs so many threads, all of which have begun before the first one ends.
template <typename Work>
void run_together(std::size_t count, const Work& work) {
  std::mutex mutex;
  std::condition_variable all_are_there;
  std::size_t there = 0;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&] {
      work();
      std::unique_lock lock(mutex);
      ++there;
      all_are_there.notify_all();
      all_are_there.wait(lock, [&] { return there == count; });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ThreadPlace, ThoseThatRunTogetherHaveDifferentOnes) {
  std::mutex mutex;
  std::vector<std::uint32_t> places;
  const auto note = [&] {
    const std::uint32_t place = this_thread_place();
    std::lock_guard lock(mutex);
    places.push_back(place);
  };
  // More than there are places, so that some have none.
  run_together(kThreadPlaces + 8, note);
  std::sort(places.begin(), places.end());
  const auto without = std::lower_bound(places.begin(), places.end(), kThreadPlaces);
  EXPECT_EQ(std::adjacent_find(places.begin(), without), without);
  EXPECT_GE(places.end() - without, 8);

  // Those are over, and their places free again.
  places.clear();
  run_together(4, note);
  EXPECT_LT(*std::max_element(places.begin(), places.end()), kThreadPlaces);
}

// Looks when the thread's own objects go, in the order that is worst.
struct LooksAtTheEnd {
  std::vector<std::uint32_t>* seen = nullptr;
  ~LooksAtTheEnd() {
    if (seen != nullptr) seen->push_back(this_thread_place());
  }
};

TEST(ThreadPlace, WhatRunsAfterAThreadHasGivenItsPlaceBackHasNone) {
  std::vector<std::uint32_t> seen;
  std::thread([&] {
    thread_local LooksAtTheEnd last;  // Made first, so that it goes last.
    last.seen = &seen;
    seen.push_back(this_thread_place());
  }).join();
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_LT(seen[0], kThreadPlaces);
  EXPECT_EQ(seen[1], kThreadPlaces);
}

#if !KVZC_SANITIZED  // With them the child of a process with threads can make none.
TEST(ThreadPlace, AForkedChildHasTheOthersPlaces) {
  std::mutex mutex;
  mutex.lock();
  std::vector<std::thread> threads;
  std::atomic<std::uint32_t> there{0};
  const std::uint32_t own = this_thread_place();
  for (std::uint32_t i = 0; i < kThreadPlaces; ++i) {
    threads.emplace_back([&] {
      (void)this_thread_place();
      ++there;
      const std::lock_guard wait(mutex);
    });
  }
  while (there < kThreadPlaces) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    std::uint32_t place = kThreadPlaces;
    std::thread([&] { place = this_thread_place(); }).join();
    _exit(place < kThreadPlaces && place != own && this_thread_place() == own ? 0 : 1);
  }
  mutex.unlock();
  for (std::thread& thread : threads) thread.join();
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

TEST(Traffic, CountsOfAllThreadsAddUpToTheLastOne) {
  constexpr std::size_t kThreads = kThreadPlaces + 8;
  constexpr std::uint64_t kEach = 1000;
  Traffic traffic;
  const auto count = [&] {
    for (std::uint64_t i = 0; i < kEach; ++i) {
      traffic.count_done(100, 2, 1000, i % 2 == 0 ? 10 : 0);
      traffic.count_small(8, 500);
    }
    traffic.count_failed();
  };
  // Twice: the second threads have the places of the first.
  run_together(kThreads, count);
  run_together(kThreads, count);
  const TrafficStats sum = traffic.read();
  EXPECT_EQ(sum.done, 2 * kThreads * kEach * 2);
  EXPECT_EQ(sum.bytes, 2 * kThreads * kEach * 108);
  EXPECT_EQ(sum.runs, 2 * kThreads * kEach * 3);
  EXPECT_EQ(sum.ns, 2 * kThreads * kEach * 1500);
  EXPECT_EQ(sum.queue_ns, 2 * kThreads * kEach * 5);
  EXPECT_EQ(sum.by_bytes[4], 2 * kThreads * kEach);
  EXPECT_EQ(sum.by_bytes[7], 2 * kThreads * kEach);
  EXPECT_EQ(sum.by_ns[9], 2 * kThreads * kEach);
  EXPECT_EQ(sum.failed, 2 * kThreads);
}

TEST(Traffic, EverySixteenthSmallOneIsTimedAndStandsForTheNext) {
  Traffic traffic;
  int timed = 0;
  for (int i = 0; i < 160; ++i) {
    if (traffic.is_to_be_timed()) {
      ++timed;
      traffic.count_small(8, 1000 * timed);
    } else {
      traffic.count_small(8, -1);
    }
  }
  EXPECT_EQ(timed, 10);
  const TrafficStats sum = traffic.read();
  EXPECT_EQ(sum.done, 160u);
  EXPECT_EQ(sum.ns, 16u * 1000 * 55);
}

}  // namespace
}  // namespace kvzc

#include "base/short_mutex.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace kvzc {
namespace {

TEST(ShortMutexTest, OnlyOneIsWithin) {
  constexpr int kThreads = 4, kTimes = 20'000;
  ShortMutex mutex;
  int count = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kTimes; ++i) {
        const std::lock_guard lock(mutex);
        ++count;
        if (i % 1000 == 0) sched_yield();  // With the lock: the others have to sleep.
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, kThreads * kTimes);
}

TEST(ShortMutexTest, TryLockDoesNotWait) {
  ShortMutex mutex;
  ASSERT_TRUE(mutex.try_lock());
  EXPECT_FALSE(mutex.try_lock());
  mutex.unlock();
  EXPECT_TRUE(mutex.try_lock());
  mutex.unlock();
}

TEST(ShortMutexTest, AllWhoSleepGetIt) {
  ShortMutex mutex;
  std::atomic<int> done{0};
  mutex.lock();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      const std::lock_guard lock(mutex);
      done.fetch_add(1);
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(done.load(), 0);
  mutex.unlock();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done.load(), 4);
}

TEST(ShortMutexTest, GoesWithAConditionVariable) {
  ShortMutex mutex;
  std::condition_variable_any changed;
  bool is_ready = false;
  std::thread waker([&] {
    const std::lock_guard lock(mutex);
    is_ready = true;
    changed.notify_all();
  });
  {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return is_ready; }));
  }
  waker.join();
}

}  // namespace
}  // namespace kvzc

// ShortMutex: a mutex for what is over in less than a microsecond, and mostly nobody else wants.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/futex.h"
#include "base/mutex.h"

namespace kvzc {

// To be used like Mutex, of which it is the fast way alone: one atomic operation to take it and one to give
// it back, in place, where that calls functions which look what kind of mutex it is. Who waits sleeps.
// Thread: any, of one process.
class KVZC_THREAD_SAFETY(capability("mutex")) ShortMutex {
 public:
  ShortMutex() = default;
  ShortMutex(const ShortMutex&) = delete;
  ShortMutex& operator=(const ShortMutex&) = delete;

  void lock() KVZC_THREAD_SAFETY(acquire_capability()) {
    if (!try_lock()) wait();
  }
  bool try_lock() KVZC_THREAD_SAFETY(try_acquire_capability(true)) {
    std::uint32_t seen = kFree;
    return word_.compare_exchange_strong(seen, kHeld, std::memory_order_acquire,
                                         std::memory_order_relaxed);
  }
  void unlock() KVZC_THREAD_SAFETY(release_capability()) {
    if (word_.exchange(kFree, std::memory_order_release) == kAwaited) futex_wake_one(word_);
  }

 private:
  static constexpr std::uint32_t kFree = 0, kHeld = 1, kAwaited = 2;

  // Who has slept does not know whether others still do, so that it leaves the mark.
  void wait() {
    while (word_.exchange(kAwaited, std::memory_order_acquire) != kFree) {
      futex_wait(word_, kAwaited, INT64_MAX, FutexScope::kPrivate);
    }
  }

  std::atomic<std::uint32_t> word_{kFree};
};

}  // namespace kvzc

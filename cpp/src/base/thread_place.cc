#include "base/thread_place.h"

#include <pthread.h>

#include <atomic>
#include <bit>
#include <utility>

namespace kvzc {

constinit thread_local std::uint32_t thread_place::number = kUnknown;

namespace {

static_assert(kThreadPlaces == 32, "one bit each");
std::atomic<std::uint32_t> taken{0};

// Takes a place, and gives it back when the thread ends.
class Guard {
 public:
  Guard() {
    // The child of a fork has one thread, and the others' places are free again.
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] {
      const std::uint32_t mine = thread_place::number;
      taken.store(mine < kThreadPlaces ? 1u << mine : 0, std::memory_order_relaxed);
    });
    thread_place::number = kThreadPlaces;
    std::uint32_t seen = taken.load(std::memory_order_relaxed);
    while (seen != ~std::uint32_t{0}) {
      const auto free = static_cast<std::uint32_t>(std::countr_one(seen));
      if (taken.compare_exchange_weak(seen, seen | (1u << free), std::memory_order_acquire,
                                      std::memory_order_relaxed)) {
        thread_place::number = free;
        return;
      }
    }
  }
  ~Guard() {
    // What still runs on this thread has none.
    const std::uint32_t mine = std::exchange(thread_place::number, kThreadPlaces);
    if (mine != kThreadPlaces) taken.fetch_and(~(1u << mine), std::memory_order_release);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
};

}  // namespace

std::uint32_t thread_place::find() {
  [[maybe_unused]] thread_local const Guard guard;
  return number;
}

}  // namespace kvzc

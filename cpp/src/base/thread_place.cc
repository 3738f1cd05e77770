#include "base/thread_place.h"

#include <pthread.h>

#include <atomic>
#include <bit>
#include <utility>

namespace kvzc {
namespace {

static_assert(kThreadPlaces == 32, "one bit each");
std::atomic<std::uint32_t> taken{0};

// Apart from the guard, and of a kind that is never destroyed: what runs on a thread after its guard has
// gone still looks here.
constinit thread_local std::uint32_t number = kThreadPlaces;
constinit thread_local bool has_asked = false;

// Takes a place, and gives it back when the thread ends.
class Guard {
 public:
  Guard() {
    // The child of a fork has one thread, and the others' places are free again.
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] {
      taken.store(number == kThreadPlaces ? 0 : 1u << number, std::memory_order_relaxed);
    });
    std::uint32_t seen = taken.load(std::memory_order_relaxed);
    while (seen != ~std::uint32_t{0}) {
      const auto free = static_cast<std::uint32_t>(std::countr_one(seen));
      if (taken.compare_exchange_weak(seen, seen | (1u << free), std::memory_order_acquire,
                                      std::memory_order_relaxed)) {
        number = free;
        return;
      }
    }
  }
  ~Guard() {
    if (number == kThreadPlaces) return;
    const std::uint32_t mine = std::exchange(number, kThreadPlaces);
    taken.fetch_and(~(1u << mine), std::memory_order_release);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
};

}  // namespace

std::uint32_t this_thread_place() {
  if (!has_asked) {
    has_asked = true;
    [[maybe_unused]] thread_local const Guard guard;
  }
  return number;
}

}  // namespace kvzc

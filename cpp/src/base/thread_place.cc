#include "base/thread_place.h"

#include <atomic>
#include <bit>

namespace kvzc {
namespace {

static_assert(kThreadPlaces == 32, "one bit each");
std::atomic<std::uint32_t> taken{0};

class Place {
 public:
  Place() {
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
  ~Place() {
    if (number != kThreadPlaces) taken.fetch_and(~(1u << number), std::memory_order_release);
    number = kThreadPlaces;  // What still runs on this thread has none.
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  std::uint32_t number = kThreadPlaces;
};

}  // namespace

std::uint32_t this_thread_place() {
  thread_local const Place place;
  return place.number;
}

}  // namespace kvzc

// SocketList: the sockets of an engine, so that a forked child can close its copies of them.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>

namespace kvzc {

// Fixed, without locks: the child may run while another thread of the parent held any lock. Sockets
// beyond its size are not listed; a child then keeps them open. Thread: any.
class SocketList {
 public:
  void add(int fd) {
    for (auto& place : places_) {
      int empty = -1;
      if (place.load(std::memory_order_relaxed) < 0 && place.compare_exchange_strong(empty, fd)) {
        return;
      }
    }
  }
  // Call before the descriptor is closed.
  void remove(int fd) {
    for (auto& place : places_) {
      int expected = fd;
      if (place.compare_exchange_strong(expected, -1)) return;
    }
  }
  // For when they are closed by others.
  void forget_all() {
    for (auto& place : places_) place.store(-1, std::memory_order_relaxed);
  }
  void close_all() {
    for (auto& place : places_) {
      if (const int fd = place.exchange(-1); fd >= 0) ::close(fd);
    }
  }

 private:
  static constexpr std::size_t kPlaces = 4096;
  struct Place : std::atomic<int> {
    Place() : std::atomic<int>(-1) {}
  };
  std::array<Place, kPlaces> places_;
};

}  // namespace kvzc

// SocketList: the sockets of an engine, so that a forked child does not keep its connections alive.
#pragma once

#include <array>
#include <atomic>

namespace kvzc {

// A child made by fork() closes its copies of what is listed, before fork() returns there: peers then
// see the end of its parent. Fixed, without locks: the child may run while another thread of the
// parent held any lock. Sockets beyond its size, and lists beyond kMostLists, are not known; a child
// then keeps them open. Thread: any.
class SocketList {
 public:
  SocketList();
  ~SocketList();
  SocketList(const SocketList&) = delete;
  SocketList& operator=(const SocketList&) = delete;

  void add(int fd);
  // Call before the descriptor is closed.
  void remove(int fd);
  // For when they are closed by others.
  void forget_all();
  void close_all();

 private:
  static constexpr std::size_t kPlaces = 4096;
  struct Place : std::atomic<int> {
    Place() : std::atomic<int>(-1) {}
  };
  std::array<Place, kPlaces> places_;
};

}  // namespace kvzc

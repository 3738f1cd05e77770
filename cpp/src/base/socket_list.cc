#include "base/socket_list.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>

namespace kvzc {
namespace {

constexpr std::size_t kMostLists = 1024;

// Every list of this process: fork() does not say whose engines there are.
std::array<std::atomic<SocketList*>, kMostLists> lists;

void close_all_in_child() {
  for (auto& each : lists) {
    if (SocketList* const list = each.exchange(nullptr)) list->close_all();
  }
}

}  // namespace

SocketList::SocketList() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, close_all_in_child); });
  for (auto& each : lists) {
    SocketList* empty = nullptr;
    if (each.compare_exchange_strong(empty, this)) return;
  }
}

SocketList::~SocketList() {
  for (auto& each : lists) {
    SocketList* expected = this;
    if (each.compare_exchange_strong(expected, nullptr)) return;
  }
}

void SocketList::add(int fd) {
  for (auto& place : places_) {
    int empty = -1;
    if (place.load(std::memory_order_relaxed) < 0 && place.compare_exchange_strong(empty, fd)) return;
  }
}

void SocketList::remove(int fd) {
  for (auto& place : places_) {
    int expected = fd;
    if (place.compare_exchange_strong(expected, -1)) return;
  }
}

void SocketList::forget_all() {
  for (auto& place : places_) place.store(-1, std::memory_order_relaxed);
}

void SocketList::close_all() {
  for (auto& place : places_) {
    if (const int fd = place.exchange(-1); fd >= 0) ::close(fd);
  }
}

}  // namespace kvzc

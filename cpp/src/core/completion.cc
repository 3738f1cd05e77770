#include "kvzc/completion.h"

#include <utility>

#include "base/futex.h"

namespace kvzc {

void Waker::fire() {
  fired_.store(1, std::memory_order_release);
  futex_wake_all(fired_, FutexScope::kPrivate);
}

void Waker::sleep(std::int64_t timeout_ns) const {
  if (!has_fired()) futex_wait(fired_, 0, timeout_ns, FutexScope::kPrivate);
}

void TransferState::lock() {
  while (watch_lock_.exchange(true, std::memory_order_acquire)) cpu_relax();
}

bool TransferState::end(Status status, std::int64_t at_ns) {
  std::uint32_t expected = kRunning;
  if (!phase_.compare_exchange_strong(expected, kEnding, std::memory_order_relaxed)) return false;
  status_ = std::move(status);
  done_ns_ = at_ns;
  // Under the lock, so that a watcher either sees the end or is seen by it; and so that nobody who
  // learned of the end can take the object away while its watches are still being called.
  lock();
  phase_.store(kEnded, std::memory_order_release);
  Watch* next = nullptr;
  for (Watch* watch = std::exchange(watches_, nullptr); watch != nullptr; watch = next) {
    next = watch->next;  // First: the call may give the watch away.
    watch->on_end(*watch);
  }
  unlock();
  return true;
}

void TransferState::watch(Watch& watch) {
  lock();
  if (has_ended()) {
    watch.on_end(watch);
  } else {
    watch.next = watches_;
    watches_ = &watch;
  }
  unlock();
}

void TransferState::unwatch(Watch& watch) {
  lock();
  for (Watch** at = &watches_; *at != nullptr; at = &(*at)->next) {
    if (*at == &watch) {
      *at = watch.next;
      break;
    }
  }
  unlock();
}

}  // namespace kvzc

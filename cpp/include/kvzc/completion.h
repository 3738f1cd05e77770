// TransferState: one accepted put or get, from its acceptance to its one end.
//
// What the end means: *done* says that every byte is readable at the target by anyone who is told
// of it afterwards, and that the source may be reused; *failed* and *cancelled* say that not one
// more byte will move. Completions are data: nothing in kvzc calls back into the caller's code.
#pragma once

#include <atomic>
#include <cstdint>

#include "kvzc/status.h"

namespace kvzc {

// What a thread sleeps on until one of the transfers it watches has ended. Lives on that thread's
// stack. Thread: owner, except fire().
class Waker {
 public:
  // Wakes the owner. Thread: any.
  void fire();
  bool has_fired() const { return fired_.load(std::memory_order_acquire) != 0; }
  // Sleeps until fired, at most `timeout_ns`; may return early.
  void sleep(std::int64_t timeout_ns) const;
  void reset() { fired_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint32_t> fired_{0};
};

class TransferState {
 public:
  TransferState() = default;
  TransferState(const TransferState&) = delete;
  TransferState& operator=(const TransferState&) = delete;

  // Thread: any.
  bool has_ended() const { return phase_.load(std::memory_order_acquire) == kEnded; }

  // Gives how it ended. Requires: has_ended().
  const Status& status() const { return status_; }

  // Ends the transfer. The first call decides; gives whether this was it. Thread: any.
  bool end(Status status, std::int64_t at_ns);

  // A place in the list of those who want to know. The watcher keeps it until `on_end` was called or
  // unwatch() has returned.
  struct Watch {
    // Called once, on the thread that ends the transfer. It may give the watch away to be freed, but
    // must call nothing of this object. Never blocks.
    void (*on_end)(Watch&) = nullptr;
    Watch* next = nullptr;
  };
  // Has the watch called when the transfer ends, at once if it has ended. Thread: any.
  void watch(Watch& watch);
  // From its return the watch is not called any more.
  void unwatch(Watch& watch);

  // Makes it ready for its next use. Requires: nobody else refers to it.
  void restart(std::int64_t submitted_ns) {
    status_ = Status();
    watches_ = nullptr;
    submitted_ns_ = submitted_ns;
    done_ns_ = 0;
    phase_.store(kRunning, std::memory_order_relaxed);
  }

  std::int64_t submitted_ns() const { return submitted_ns_; }
  // 0 until the end. CLOCK_MONOTONIC.
  std::int64_t done_ns() const { return has_ended() ? done_ns_ : 0; }

 private:
  enum Phase : std::uint32_t { kRunning, kEnding, kEnded };

  void lock();
  void unlock() { watch_lock_.store(false, std::memory_order_release); }

  std::atomic<std::uint32_t> phase_{kEnded};
  std::atomic<bool> watch_lock_{false};
  Watch* watches_ = nullptr;  // Guarded by watch_lock_.
  Status status_;
  std::int64_t submitted_ns_ = 0;
  std::int64_t done_ns_ = 0;
};

// A watch that fires a waker.
struct WakerWatch : TransferState::Watch {
  explicit WakerWatch(Waker& waker_to_fire) : waker(&waker_to_fire) {
    on_end = [](Watch& watch) { static_cast<WakerWatch&>(watch).waker->fire(); };
  }
  Waker* waker;
};

}  // namespace kvzc

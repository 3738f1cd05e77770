// Patience: how long it pays to look for something before one sleeps until it comes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kvzc {

// Twice as long as it took lately, when that is short enough. Each look that was in vain halves it:
// who waits again and again for what does not come must not spend its processor on that.
// Thread: any; a lost update does no harm.
class Patience {
 public:
  Patience(std::int64_t least_ns, std::int64_t most_ns)
      : least_ns_(least_ns), most_ns_(most_ns), ns_(least_ns) {}

  // Before anybody waits.
  void set_most(std::int64_t most_ns) { most_ns_ = most_ns; }

  std::int64_t ns() const { return ns_.load(std::memory_order_relaxed); }
  // It came, so long after somebody began to wait, whether by looking or asleep.
  void came_after(std::int64_t took_ns) {
    // What takes longer than that is slept for.
    const std::int64_t wanted = took_ns <= most_ns_ ? std::min(2 * took_ns, most_ns_) : 0;
    ns_.store((ns() + std::max(wanted, least_ns_)) / 2, std::memory_order_relaxed);
  }
  void was_in_vain() { ns_.store(std::max(ns() / 2, least_ns_), std::memory_order_relaxed); }

 private:
  const std::int64_t least_ns_;
  std::int64_t most_ns_;
  std::atomic<std::int64_t> ns_;
};

}  // namespace kvzc

// The one clock: CLOCK_MONOTONIC, in nanoseconds. On one host all processes share it.
#pragma once

#include <time.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace kvzc {

inline std::int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// A point in time by which something must have happened, or never.
class Deadline {
 public:
  static Deadline never() { return Deadline(std::numeric_limits<std::int64_t>::max()); }
  static Deadline at_ns(std::int64_t at) { return Deadline(at); }
  // Seconds from now; infinity and anything beyond a century mean never; below zero, and what is no
  // number, mean now.
  static Deadline after_seconds(double seconds) {
    if (seconds >= 3.0e9) return never();
    return Deadline(now_ns() + (seconds > 0 ? static_cast<std::int64_t>(seconds * 1e9) : 0));
  }

  bool is_never() const { return at_ns_ == std::numeric_limits<std::int64_t>::max(); }
  bool has_passed() const { return !is_never() && now_ns() >= at_ns_; }
  // Nanoseconds left, at least 0 and at most `limit_ns`.
  std::int64_t left_ns(std::int64_t limit_ns) const {
    if (is_never()) return limit_ns;
    const std::int64_t left = at_ns_ - now_ns();
    return left < 0 ? 0 : (left < limit_ns ? left : limit_ns);
  }
  std::int64_t at() const { return at_ns_; }

 private:
  explicit Deadline(std::int64_t at) : at_ns_(at) {}
  std::int64_t at_ns_;
};

}  // namespace kvzc

#include "transport/fault/trouble.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvzc::fault {
namespace {

// SplitMix64: a step that visits every number, and a mixer that hides the step.
constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15;

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : place_(seed) {}

  std::uint64_t next() { return mix(place_ += kStep); }
  // 0 <= x < 1, so that a chance of 0 never comes and one of 1 always does.
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool happens(double chance) { return unit() < chance; }
  std::size_t below(std::size_t n) { return next() % n; }
  std::int64_t delay_ns(double most_seconds) {
    return static_cast<std::int64_t>(unit() * most_seconds * 1e9);
  }

 private:
  std::uint64_t place_;
};

Status out_of_range(const char* name, double value, const char* allowed) {
  return Status(Code::kInvalidArgument, std::string("faults: ") + name + " is " +
                                            std::to_string(value) + "; it must be " + allowed);
}

}  // namespace

std::vector<Cut> cut(const Operation& operation, std::uint64_t limit) {
  if (limit == 0) limit = UINT64_MAX;
  std::vector<Cut> cuts;
  Cut open{};
  for (std::uint32_t at = 0; at < operation.segments.size(); ++at) {
    const Segment& segment = operation.segments[at];
    for (std::uint32_t run = segment.first_run; run < segment.first_run + segment.run_count; ++run) {
      std::uint64_t left = operation.runs[run].nbytes;
      while (left > 0) {
        if (open.nbytes == 0) open = {at, run, operation.runs[run].nbytes - left, 0, 0};
        const std::uint64_t take = std::min(left, limit - open.nbytes);
        open.nbytes += take;
        left -= take;
        if (open.nbytes < limit) continue;
        cuts.push_back(open);
        open.nbytes = 0;
      }
    }
  }
  if (open.nbytes != 0) cuts.push_back(open);
  return cuts;
}

Status check(const FaultOptions& options) {
  const std::pair<const char*, double> chances[] = {{"post_failure", options.post_failure},
                                                    {"stripe_failure", options.stripe_failure},
                                                    {"completion_loss", options.completion_loss}};
  // Asked so that what is no number is refused too.
  for (const auto& [name, chance] : chances) {
    if (!(chance >= 0 && chance <= 1)) return out_of_range(name, chance, "0 to 1");
  }
  if (!(options.most_delay_seconds >= 0 && options.most_delay_seconds <= 1e6)) {
    return out_of_range("most_delay_seconds", options.most_delay_seconds, "0 to 1e6");
  }
  if (!(options.detection_seconds >= 0)) {
    return out_of_range("detection_seconds", options.detection_seconds, "0 or more");
  }
  return Status::ok();
}

Trouble Dice::trouble_for(const Operation& operation) {
  Random random(mix(place_.fetch_add(kStep, std::memory_order_relaxed)));
  Trouble out;
  // All three are drawn, so that one chance does not shift what the others hit.
  out.fails_at_once = random.happens(options_.post_failure);
  out.fails_midway = random.happens(options_.stripe_failure);
  out.loses_completion = random.happens(options_.completion_loss);
  if (out.fails_at_once) return out;

  out.cuts = cut(operation, options_.stripe_bytes);
  std::vector<Cut>& cuts = out.cuts;
  if (options_.reorder) {
    for (std::size_t i = cuts.size(); i > 1; --i) std::swap(cuts[i - 1], cuts[random.below(i)]);
  }
  // Nothing of a transfer without bytes could have moved.
  out.fails_midway = out.fails_midway && !cuts.empty();
  if (out.fails_midway && cuts.size() > 1) cuts.resize(1 + random.below(cuts.size() - 1));

  // The order was drawn, so the times only have to be random: the earliest is the first one's.
  std::vector<std::int64_t> delays(cuts.size());
  for (std::int64_t& delay : delays) delay = random.delay_ns(options_.most_delay_seconds);
  std::sort(delays.begin(), delays.end());
  for (std::size_t i = 0; i < cuts.size(); ++i) cuts[i].delay_ns = delays[i];
  out.end_delay_ns = random.delay_ns(options_.most_delay_seconds);
  return out;
}

std::int64_t Dice::delay_ns() {
  if (options_.most_delay_seconds == 0) return 0;
  Random random(mix(place_.fetch_add(kStep, std::memory_order_relaxed)));
  return random.delay_ns(options_.most_delay_seconds);
}

}  // namespace kvzc::fault

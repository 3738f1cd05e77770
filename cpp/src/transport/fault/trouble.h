// Trouble: what is to happen to a transfer, drawn before it begins.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kvzc/faults.h"
#include "kvzc/status.h"
#include "kvzc/transport.h"

namespace kvzc::fault {

// A stripe that is not made yet: where in an operation it begins, how long it is, when it begins.
struct Cut {
  std::uint32_t segment;
  std::uint32_t run;
  std::uint64_t skip_bytes;  // Bytes of `run` that belong to the cut before.
  std::uint64_t nbytes;
  std::int64_t delay_ns;  // Counted from the post.
};

struct Trouble {
  bool fails_at_once = false;
  bool fails_midway = false;     // After all of `cuts`, which are not all there are.
  bool loses_completion = false;
  std::vector<Cut> cuts;         // In the order in which they begin.
  std::int64_t end_delay_ns = 0;
};

// Cuts an operation into stripes of at most `limit` bytes; 0: one stripe.
std::vector<Cut> cut(const Operation& operation, std::uint64_t limit);

// Errors: kInvalidArgument for a chance that is none, or a time that is none.
Status check(const FaultOptions& options);

// Draws from one seeded sequence. Each draw takes one number of it and makes its own sequence of
// that, so the trouble of a post depends on how many came before, and on nothing else of theirs.
class Dice {
 public:
  explicit Dice(const FaultOptions& options) : options_(options), place_(options.seed) {}

  // Thread: any.
  Trouble trouble_for(const Operation& operation);
  std::int64_t delay_ns();

 private:
  const FaultOptions options_;
  std::atomic<std::uint64_t> place_;
};

}  // namespace kvzc::fault

// FaultOptions: trouble on demand, for tests of programs that must live with it.
#pragma once

#include <cstdint>

namespace kvzc {

// Every transport of the engine is wrapped in one that makes such trouble. What is promised stays
// promised: a notify never overtakes its data, a transfer ends once, and not one byte moves after
// the end. Chances are 0 to 1 and drawn from one seeded sequence.
struct FaultOptions {
  std::uint64_t seed = 1;

  // Each transfer is cut into stripes of at most this many bytes, which travel apart. 0: not cut.
  std::uint64_t stripe_bytes = 0;
  // Stripes, ends and tags without data are held back for a random time up to this.
  double most_delay_seconds = 0;
  // Stripes of one transfer begin in random order.
  bool reorder = false;

  // A transfer fails at once, as kSystem, and nothing of it has moved.
  double post_failure = 0;
  // A transfer fails, as kSystem, after some of its stripes have moved.
  double stripe_failure = 0;
  // All bytes move but the end is never told: the transfer runs until it is cancelled, its deadline
  // passes, or the peer is lost. Its tag then says that it failed.
  double completion_loss = 0;

  // After this many posts on one channel the peer falls silent: nothing moves any more, no tag
  // goes out. 0: never.
  std::uint64_t vanish_after_posts = 0;
  // So long after it fell silent the peer is reported lost. Infinity: never.
  double detection_seconds = 1.0;
};

}  // namespace kvzc

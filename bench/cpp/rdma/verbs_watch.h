// Counts what this process asks of its RDMA devices, kvzc's calls and those of the floor alike.
//
// Linked in place of ibv::load() (--wrap), so that devices opened later can have their entries
// exchanged: while nobody watches, the calls go straight to the device.
#pragma once

#include <cstdint>

namespace kvzc::bench {

struct VerbsCounts {
  std::uint64_t posts = 0;        // ibv_post_send: doorbells.
  std::uint64_t requests = 0;     // Work requests in them,
  std::uint64_t signalled = 0;    // and how many of those ask for a completion.
  std::uint64_t post_ns = 0;      // Within ibv_post_send.
  std::uint64_t polls = 0;        // ibv_poll_cq,
  std::uint64_t completions = 0;  // and what it gave.
  std::uint64_t arms = 0;         // ibv_req_notify_cq: somebody is about to sleep.
};

// Before anything else: there is only null_device.h in this process.
void use_null_device();

// Counts from the constructor on. One at a time; while it begins and ends nothing may be under way.
class VerbsWatch {
 public:
  VerbsWatch();
  ~VerbsWatch();
  VerbsWatch(const VerbsWatch&) = delete;
  VerbsWatch& operator=(const VerbsWatch&) = delete;
  VerbsCounts counts() const;
};

}  // namespace kvzc::bench

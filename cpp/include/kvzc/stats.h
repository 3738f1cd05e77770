// What engines count. Snapshots; each number is exact, two of them need not be of one moment.
#pragma once

#include <array>
#include <cstdint>

#include "kvzc/status.h"

namespace kvzc {

// Counts by powers of two: bucket i holds what is at least 2^(i-1) and less than 2^i; bucket 0 zeros.
using Log2Histogram = std::array<std::uint64_t, 65>;

// Transfers to one peer over one transport in one direction that have ended.
struct TrafficStats {
  std::uint64_t done = 0, failed = 0, cancelled = 0;
  // Of those that are done.
  std::uint64_t bytes = 0, runs = 0;
  // From acceptance to the end, all together. Of transfers up to 1 KiB that were over within their call
  // every sixteenth of a thread is timed, and stands for those after it.
  std::uint64_t ns = 0;
  // Of that, until the transport was asked: they waited for the connection, or for room in the inbox.
  std::uint64_t queue_ns = 0;
  Log2Histogram by_bytes{}, by_ns{};
};

struct EngineStats {
  std::uint64_t regions = 0, storages = 0, grants = 0, peers = 0;
  std::uint64_t transfers_running = 0, transfers_done = 0, transfers_failed = 0,
                transfers_cancelled = 0;
  std::uint64_t bytes_done = 0, runs_done = 0, temporary_registrations = 0;
  std::uint64_t arrivals_pending = 0, arrivals_arrived = 0, arrivals_taken = 0,
                arrivals_expired = 0, arrivals_forgotten = 0;
  // From acceptance until the transport was asked, of all transfers that are done.
  std::uint64_t queue_ns = 0;
  // What the program's threads have waited, all together: for transfers (beyond a first look at each,
  // and what they copied themselves), to have one accepted, and for tags.
  std::uint64_t wait_ns = 0, accept_wait_ns = 0, arrival_wait_ns = 0;
  // Of revoked grants that a peer which did not answer may still be within.
  std::uint64_t quarantined_bytes = 0;
  std::array<std::uint64_t, kCodeCount> failed_by_code{};
};

}  // namespace kvzc

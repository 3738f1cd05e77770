// Traffic: counters of one peer and transport, bumped by whichever thread ends a transfer.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <string>
#include <utility>

#include "kvzc/engine.h"
#include "kvzc/stats.h"

namespace kvzc {

// Thread: any. Cost: some uncontended atomic additions.
class Traffic {
 public:
  void count_done(std::uint64_t nbytes, std::uint64_t runs, std::int64_t took_ns,
                  std::int64_t queued_ns) {
    const auto ns = static_cast<std::uint64_t>(took_ns > 0 ? took_ns : 0);
    add(bytes_, nbytes);
    add(runs_, runs);
    add(ns_, ns);
    if (queued_ns > 0) add(queue_ns_, static_cast<std::uint64_t>(queued_ns));
    add(by_bytes_[static_cast<std::size_t>(std::bit_width(nbytes))], 1);
    add(by_ns_[static_cast<std::size_t>(std::bit_width(ns))], 1);
  }
  void count_failed() { add(failed_, 1); }
  void count_cancelled() { add(cancelled_, 1); }

  TrafficStats read() const {
    TrafficStats out;
    for (std::size_t i = 0; i < out.by_bytes.size(); ++i) {
      out.by_bytes[i] = by_bytes_[i].load(std::memory_order_relaxed);
      out.by_ns[i] = by_ns_[i].load(std::memory_order_relaxed);
      out.done += out.by_bytes[i];
    }
    out.failed = failed_.load(std::memory_order_relaxed);
    out.cancelled = cancelled_.load(std::memory_order_relaxed);
    out.bytes = bytes_.load(std::memory_order_relaxed);
    out.runs = runs_.load(std::memory_order_relaxed);
    out.ns = ns_.load(std::memory_order_relaxed);
    out.queue_ns = queue_ns_.load(std::memory_order_relaxed);
    return out;
  }

 private:
  using Counter = std::atomic<std::uint64_t>;
  static void add(Counter& counter, std::uint64_t value) {
    counter.fetch_add(value, std::memory_order_relaxed);
  }
  Counter bytes_{0}, runs_{0}, ns_{0}, queue_ns_{0}, failed_{0}, cancelled_{0};
  std::array<Counter, std::tuple_size_v<Log2Histogram>> by_bytes_{}, by_ns_{};
};

struct PeerTraffic {
  PeerTraffic(PeerInfo info, std::string name) : peer(std::move(info)), transport(std::move(name)) {}
  const PeerInfo peer;
  const std::string transport;
  // The peer was reached with no better transport.
  std::atomic<bool> is_first_choice{false};
  Traffic put, get;

  Traffic& in(Direction direction) { return direction == Direction::kPut ? put : get; }
};

}  // namespace kvzc

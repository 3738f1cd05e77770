// Traffic: counters of one peer and transport, bumped by whichever thread ends a transfer.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "base/thread_place.h"
#include "kvzc/engine.h"
#include "kvzc/stats.h"

namespace kvzc {

// Thread: any. Cost: some additions, which are not even atomic for the first threads of a process: each
// has counters of its own, and who reads adds them up.
class Traffic {
 public:
  Traffic() = default;
  ~Traffic() {
    for (auto& each : own_) delete each.load(std::memory_order_relaxed);
  }
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

  void count_done(std::uint64_t nbytes, std::uint64_t runs, std::int64_t took_ns,
                  std::int64_t queued_ns) {
    const Adder adder(own());
    count(adder, adder.to(common_), nbytes, runs, took_ns);
    if (queued_ns > 0) {
      adder.add(adder.to(common_).queue_ns, static_cast<std::uint64_t>(queued_ns));
    }
  }

  // Says whether the next small transfer of this thread should be timed: every sixteenth is, since
  // looking at the clock twice would cost as much as the transfer.
  bool is_to_be_timed() {
    Counters* const mine = own();
    return mine == nullptr || mine->small % 16 == 0;
  }
  // Counts a small one that is done. `took_ns` below 0: it was not timed, and is counted as the thread's
  // last one that was.
  void count_small(std::uint64_t nbytes, std::int64_t took_ns) {
    const Adder adder(own());
    Counters& to = adder.to(common_);
    if (adder.is_alone()) {
      if (took_ns < 0) took_ns = to.last_small_ns;
      to.last_small_ns = took_ns;
      ++to.small;
    }
    count(adder, to, nbytes, 1, took_ns);
  }

  void count_failed() { failed_.fetch_add(1, std::memory_order_relaxed); }
  void count_cancelled() { cancelled_.fetch_add(1, std::memory_order_relaxed); }

  TrafficStats read() const {
    TrafficStats out;
    add_up(common_, out);
    for (const auto& each : own_) {
      if (const Counters* mine = each.load(std::memory_order_acquire)) add_up(*mine, out);
    }
    out.failed = failed_.load(std::memory_order_relaxed);
    out.cancelled = cancelled_.load(std::memory_order_relaxed);
    return out;
  }

 private:
  using Counter = std::atomic<std::uint64_t>;
  struct Counters {
    Counter bytes{0}, runs{0}, ns{0}, queue_ns{0};
    std::array<Counter, std::tuple_size_v<Log2Histogram>> by_bytes{}, by_ns{};
    // Of the thread alone.
    std::uint32_t small = 0;
    std::int64_t last_small_ns = 0;
  };

  // Adds to the thread's own counters, or to those of all.
  class Adder {
   public:
    explicit Adder(Counters* own) : own_(own) {}
    bool is_alone() const { return own_ != nullptr; }
    Counters& to(Counters& common) const { return own_ != nullptr ? *own_ : common; }
    void add(Counter& counter, std::uint64_t value) const {
      if (own_ != nullptr) {
        counter.store(counter.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
      } else {
        counter.fetch_add(value, std::memory_order_relaxed);
      }
    }

   private:
    Counters* const own_;
  };

  // Gives this thread's counters, or null: no number is free, or no memory.
  Counters* own() {
    const std::uint32_t place = this_thread_place();
    if (place >= own_.size()) return nullptr;
    Counters* mine = own_[place].load(std::memory_order_relaxed);
    if (mine == nullptr) {
      mine = new (std::nothrow) Counters;
      own_[place].store(mine, std::memory_order_release);
    }
    return mine;
  }

  static void count(const Adder& adder, Counters& to, std::uint64_t nbytes, std::uint64_t runs,
                    std::int64_t took_ns) {
    const auto ns = static_cast<std::uint64_t>(took_ns > 0 ? took_ns : 0);
    adder.add(to.bytes, nbytes);
    adder.add(to.runs, runs);
    adder.add(to.ns, ns);
    adder.add(to.by_bytes[static_cast<std::size_t>(std::bit_width(nbytes))], 1);
    adder.add(to.by_ns[static_cast<std::size_t>(std::bit_width(ns))], 1);
  }

  static void add_up(const Counters& from, TrafficStats& out) {
    for (std::size_t i = 0; i < out.by_bytes.size(); ++i) {
      const std::uint64_t count = from.by_bytes[i].load(std::memory_order_relaxed);
      out.by_bytes[i] += count;
      out.by_ns[i] += from.by_ns[i].load(std::memory_order_relaxed);
      out.done += count;
    }
    out.bytes += from.bytes.load(std::memory_order_relaxed);
    out.runs += from.runs.load(std::memory_order_relaxed);
    out.ns += from.ns.load(std::memory_order_relaxed);
    out.queue_ns += from.queue_ns.load(std::memory_order_relaxed);
  }

  Counters common_;
  Counter failed_{0}, cancelled_{0};
  std::array<std::atomic<Counters*>, kThreadPlaces> own_{};
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

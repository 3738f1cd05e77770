// Inbox: the tags that have arrived at this engine and that nobody has taken yet.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvzc/engine.h"
#include "kvzc/status.h"

namespace kvzc {

class Endpoint;

// Thread: any.
class Inbox {
 public:
  explicit Inbox(std::int64_t ttl_ns) : ttl_ns_(ttl_ns) {}

  // Whom a tag came from, and by which of the engine's transports: its credit goes back that way.
  struct Origin {
    std::weak_ptr<Endpoint> endpoint;
    std::size_t transport = 0;
  };

  // What one call took out, and whom that gives credits back. Call settle() outside all locks.
  class Credits {
   public:
    void add(const Origin& origin);
    void settle();
    bool is_empty() const { return counts_.empty(); }

   private:
    std::vector<std::pair<Origin, std::uint32_t>> counts_;
  };

  // Takes in a tag, or drops it when it is a forgotten one.
  void add(std::shared_ptr<const PeerInfo> peer, Origin origin, std::string_view tag, Code code,
           std::int64_t now, Credits* credits);

  // Takes `count` arrivals of `tag`, or none if there are fewer. `peer` null: from anybody.
  std::vector<Arrival> take(std::string_view tag, std::size_t count, const PeerInfo* peer,
                            Credits* credits);
  // Takes up to `most` of those that nobody waits for, the oldest first.
  std::vector<Arrival> poll(std::size_t most, Credits* credits);
  // Says whether poll() would give something.
  bool has_pollable();
  void forget(std::string_view tag, std::int64_t now, Credits* credits);
  void expire(std::int64_t now, Credits* credits);

  // While somebody waits for a tag, poll() leaves it alone.
  void begin_wait(std::string_view tag);
  void end_wait(std::string_view tag);

  struct Counts {
    std::uint64_t pending = 0, arrived = 0, taken = 0, expired = 0, forgotten = 0;
  };
  Counts counts();

 private:
  struct Item {
    std::string tag;
    std::shared_ptr<const PeerInfo> peer;
    Origin origin;
    Code code;
    std::int64_t arrived_ns;
  };
  using Order = std::list<Item>;

  Arrival remove(Order::iterator item, Credits* credits);

  const std::int64_t ttl_ns_;
  std::mutex mutex_;  // Guards the rest.
  Order order_;       // The oldest first.
  std::unordered_map<std::string, std::deque<Order::iterator>> by_tag_;
  std::unordered_map<std::string, std::uint32_t> waited_for_;
  std::unordered_map<std::string, std::int64_t> forgotten_until_;
  Counts counts_;
};

}  // namespace kvzc

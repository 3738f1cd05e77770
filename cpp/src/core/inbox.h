// Inbox: the tags that have arrived at this engine and that nobody has taken yet.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "kvzc/engine.h"
#include "kvzc/status.h"

namespace kvzc {

class Endpoint;

// Thread: any.
class Inbox {
 public:
  explicit Inbox(std::int64_t ttl_ns);

  // Whom a tag came from, and by which of the engine's transports: its credit goes back that way.
  struct Origin {
    std::weak_ptr<Endpoint> endpoint;
    std::size_t transport = 0;
  };

  // What one call took out, and whom that gives credits back. Call settle() outside all locks.
  class Credits {
   public:
    void add(Origin origin);
    void settle();
    bool is_empty() const { return first_.second == 0; }

   private:
    using Count = std::pair<Origin, std::uint32_t>;
    Count first_{{}, 0};  // Mostly the only one.
    std::vector<Count> others_;
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
    Code code = Code::kOk;
    std::int64_t arrived_ns = 0;
    Item* next_of_tag = nullptr;
    std::list<Item>::iterator self;
  };
  using Order = std::list<Item>;

  // Those of one tag, the oldest first.
  struct Same {
    Item* first = nullptr;
    Item* last = nullptr;
    std::size_t count = 0;
  };

  // Looks tags up without making strings of them.
  struct Hash {
    using is_transparent = void;  // NOLINT(readability-identifier-naming): the library looks for it.
    std::size_t operator()(std::string_view tag) const { return std::hash<std::string_view>()(tag); }
  };
  template <typename T>
  using ByTag = std::unordered_map<std::string, T, Hash, std::equal_to<>>;

  Same& same_as(std::string_view tag) KVZC_REQUIRES(mutex_);
  Arrival remove(Item& item, Credits* credits) KVZC_REQUIRES(mutex_);

  const std::int64_t ttl_ns_;
  Mutex mutex_;  // Guards the rest.
  Order order_ KVZC_GUARDED_BY(mutex_);       // The oldest first.
  ByTag<Same> by_tag_ KVZC_GUARDED_BY(mutex_);
  ByTag<std::uint32_t> waited_for_ KVZC_GUARDED_BY(mutex_);
  ByTag<std::int64_t> forgotten_until_ KVZC_GUARDED_BY(mutex_);
  Counts counts_ KVZC_GUARDED_BY(mutex_);
  // Used again, so that a tag that comes and goes takes no memory.
  Order spare_ KVZC_GUARDED_BY(mutex_);
  std::vector<ByTag<Same>::node_type> spare_nodes_ KVZC_GUARDED_BY(mutex_);
};

}  // namespace kvzc

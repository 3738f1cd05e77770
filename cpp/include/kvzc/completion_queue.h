// CompletionQueue: one entry per transfer that has ended, until somebody takes it.
//
// Bounded: room for an entry is taken before its transfer is started, so that an end never finds the
// queue full. One queue may serve the transfers of several engines. Thread: any, for every method.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvzc/engine.h"
#include "kvzc/status.h"

namespace kvzc {

class CompletionQueue {
 public:
  // What the caller wants to have back with an end.
  using Label = std::shared_ptr<void>;
  struct Entry {
    Transfer transfer;  // Has ended.
    Label label;
  };

  // Errors: kInvalidArgument when `depth` is 0.
  static Result<std::shared_ptr<CompletionQueue>> create(std::size_t depth);
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  // Room for one entry; given back when it goes unused.
  class Place {
   public:
    Place() = default;
    ~Place();
    Place(Place&&) noexcept;
    Place& operator=(Place) noexcept;
    // The transfer's end, if need be one that has come already, becomes an entry. Called once.
    void fill(Transfer transfer, Label label) &&;

   private:
    friend class CompletionQueue;
    struct Node;
    class Shared;
    explicit Place(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
    std::shared_ptr<Shared> shared_;
  };
  // Errors: kWouldBlock when as many as the depth are running or not taken yet; kClosed;
  // kForkedEngine in a child made by fork().
  Result<Place> reserve();
  // Sleeps until there may be room, at most until the deadline.
  void wait_for_room(std::int64_t deadline_ns);

  // Takes up to `most` entries, in the order in which they ended; never waits. Errors: kClosed,
  // kForkedEngine.
  Result<std::vector<Entry>> poll(std::size_t most);
  // Takes up to `most`, as soon as there is one; helps with the copying meanwhile. Errors: kTimedOut,
  // kClosed, kForkedEngine.
  Result<std::vector<Entry>> wait(std::size_t most, std::int64_t deadline_ns);
  // Gives a descriptor that is readable while there is an entry. It belongs to the queue. Errors:
  // kLimitExceeded, kClosed, kForkedEngine.
  Result<int> fd();

  std::size_t depth() const;
  // Transfers that have not ended / that have and were not taken.
  std::size_t running() const;
  std::size_t ended() const;
  bool is_closed() const;
  // Forgets all entries; transfers that run go on, and their ends are told nobody. Idempotent.
  void close();

 private:
  explicit CompletionQueue(std::shared_ptr<Place::Shared> shared);
  // Kept by places and by ends that are being told.
  std::shared_ptr<Place::Shared> shared_;
};

}  // namespace kvzc

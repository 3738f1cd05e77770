// OperationSlot: an operation with what it keeps alive, and the pool that slots come from.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/thread_place.h"
#include "kvzc/transport.h"

namespace kvzc {

class Binding;
class Traffic;

class OperationSlot : public Operation {
 public:
  // Which of the handle's storages each segment touches, until the binding is resolved.
  std::vector<std::uint32_t> segment_storage;
  // Sources and targets: alive until the end.
  std::vector<std::shared_ptr<const void>> pins;
  // What the channel belongs to: alive as long as anybody may still call help() on it.
  std::shared_ptr<const void> road;
  std::shared_ptr<Binding> binding;  // Null: a tag for a peer that no handle named.
  std::atomic<const char*> transport{nullptr};  // Which one carries it, once chosen.
  std::uint64_t run_count = 0;
  bool has_credit = false;
  Traffic* traffic = nullptr;  // Of the peer, kept by `road`. Null: none was reached.
  std::string label;  // For a trace, and only then.
  // When the transport was asked. 0: never, or at once and nobody needs to know.
  std::int64_t posted_ns = 0;
  bool has_waited = false;  // It was not posted at once.
  // Its place in Deadlines, as long as that has not come. Set before it is posted.
  bool has_deadline = false;
  std::optional<std::multimap<std::int64_t, OperationSlot*>::iterator> deadline;
};

// Slots are used again, with the room their lists have grown to. Thread: any. Cost: no lock, where the
// thread has given back as many as it took.
class OperationPool {
 public:
  // Gives an empty slot that nobody refers to.
  OperationSlot* take();
  // Takes back a slot that nobody refers to.
  void give_back(OperationSlot* slot);

 private:
  OperationSlot* take_shared();
  void give_back_shared(OperationSlot* slot);

  // Some that one thread has given back, and takes again.
  struct alignas(64) Own {
    std::uint32_t count = 0;
    std::array<OperationSlot*, 14> free;
  };
  std::array<Own, kThreadPlaces> own_;

  Mutex mutex_;  // Guards the rest.
  std::vector<std::unique_ptr<OperationSlot>> all_ KVZC_GUARDED_BY(mutex_);
  std::vector<OperationSlot*> free_ KVZC_GUARDED_BY(mutex_);
  std::size_t kept_runs_ KVZC_GUARDED_BY(mutex_) = 0;  // What the lists of the free ones have room for.
};

}  // namespace kvzc

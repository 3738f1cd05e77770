// GrantTable: the rights that an engine has given out, and the storages they reach.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/fence_board.h"
#include "base/mutex.h"
#include "kvzc/handle.h"
#include "kvzc/memory.h"

namespace kvzc {

struct GrantRecord {
  std::uint64_t id = 0;
  GrantKey key{};
  FenceTicket fence;
  Access access = Access::kBoth;
  std::uint64_t nbytes = 0;  // Of the view that it grants.
  // What the view lies in; the region keeps it until the grant is revoked.
  std::weak_ptr<const RegionMemory> memory;
  std::weak_ptr<RegionRecord> region;
};

// Thread: any.
class GrantTable {
 public:
  GrantTable(FenceBoard& board) : board_(board) {}

  // Errors: kLimitExceeded when as many are alive as the engine was made for.
  Result<std::shared_ptr<const GrantRecord>> add(
      Access access, std::uint64_t nbytes, const std::shared_ptr<const RegionMemory>& memory);
  // Gives the grant, or null when it was revoked or never made.
  std::shared_ptr<const GrantRecord> find(std::uint64_t id) const;
  // Moves its epoch on: no writer begins another chunk. Those that have begun are waited for by
  // Channel::fence(). Until retire() its slot is not used again.
  void revoke(const GrantRecord& grant);
  // Frees the slot of a revoked grant once no writer can be inside.
  void retire(FenceTicket grant);
  std::size_t size() const;

 private:
  FenceBoard& board_;
  mutable Mutex mutex_;  // Guards the rest.
  std::unordered_map<std::uint64_t, std::shared_ptr<const GrantRecord>> grants_ KVZC_GUARDED_BY(mutex_);
  std::vector<std::uint32_t> free_slots_ KVZC_GUARDED_BY(mutex_);
  std::uint32_t next_slot_ KVZC_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvzc

#include "core/grant_table.h"

#include "base/sha256.h"

namespace kvzc {
namespace {

// An id is a slot of the board and the slot's generation, so that an old id never names a new
// grant.
constexpr int kSlotBits = 24;

std::uint64_t make_id(std::uint32_t slot, std::uint64_t epoch) {
  return ((epoch >> 1) << kSlotBits) | slot;
}

}  // namespace

Result<std::shared_ptr<const GrantRecord>> GrantTable::add(
    Access access, std::uint64_t nbytes,
    const std::shared_ptr<const RegionMemory>& memory) {
  auto grant = std::make_shared<GrantRecord>();
  Status filled = fill_random(grant->key);
  if (!filled.is_ok()) return filled;
  grant->access = access;
  grant->nbytes = nbytes;
  grant->memory = memory;
  grant->region = memory->region;
  const MutexLock lock(mutex_);
  if (!free_slots_.empty()) {
    grant->fence.slot = free_slots_.back();
    free_slots_.pop_back();
  } else if (next_slot_ < board_.slots()) {
    grant->fence.slot = next_slot_++;
  } else {
    return Status(Code::kLimitExceeded,
                  std::to_string(board_.slots()) +
                      " grants are alive, which is as many as this engine was made for; revoke "
                      "some, or make the engine with a larger max_grants");
  }
  grant->fence.epoch = board_.epoch(grant->fence.slot);
  grant->id = make_id(grant->fence.slot, grant->fence.epoch);
  grants_[grant->id] = grant;
  return std::shared_ptr<const GrantRecord>(grant);
}

std::shared_ptr<const GrantRecord> GrantTable::find(std::uint64_t id) const {
  const MutexLock lock(mutex_);
  const auto found = grants_.find(id);
  return found == grants_.end() ? nullptr : found->second;
}

void GrantTable::revoke(const GrantRecord& grant) {
  const MutexLock lock(mutex_);
  if (grants_.erase(grant.id) == 0) return;
  board_.set_epoch(grant.fence.slot, grant.fence.epoch + 1);
}

void GrantTable::retire(FenceTicket grant) {
  const MutexLock lock(mutex_);
  // Two that closed at the same time both come here; the slot is free once.
  if (board_.epoch(grant.slot) != grant.epoch + 1) return;
  board_.set_epoch(grant.slot, grant.epoch + 2);
  free_slots_.push_back(grant.slot);
}

std::size_t GrantTable::size() const {
  const MutexLock lock(mutex_);
  return grants_.size();
}

}  // namespace kvzc

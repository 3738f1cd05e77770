#include "core/operation_slot.h"

#include "core/binding.h"

namespace kvzc {
namespace {

// Slots that once carried huge operations do not keep their lists for ever: all together have room for
// so many runs, 24 MB. Making a list anew costs more than filling it.
constexpr std::size_t kMostKeptRuns = 1 << 20;
// Of those that threads keep for themselves, which are not counted among them.
constexpr std::size_t kMostOwnRuns = 64;

}  // namespace

OperationSlot* OperationPool::take() {
  if (const std::uint32_t place = this_thread_place(); place < kThreadPlaces) {
    Own& own = own_[place];
    if (own.count > 0) return own.free[--own.count];
  }
  return take_shared();
}

OperationSlot* OperationPool::take_shared() {
  const MutexLock lock(mutex_);
  if (free_.empty()) {
    all_.push_back(std::make_unique<OperationSlot>());
    free_.reserve(all_.size());
    return all_.back().get();
  }
  OperationSlot* const slot = free_.back();
  free_.pop_back();
  kept_runs_ -= slot->runs.capacity();
  return slot;
}

void OperationPool::give_back(OperationSlot* slot) {
  if (!slot->pins.empty()) slot->pins.clear();
  slot->channel.store(nullptr, std::memory_order_relaxed);
  slot->road.reset();
  slot->binding.reset();
  slot->runs.clear();
  slot->segments.clear();
  slot->segment_storage.clear();
  slot->progress = nullptr;
  slot->chunks.clear();
  slot->transport.store(nullptr, std::memory_order_relaxed);
  slot->run_count = 0;
  slot->nbytes = 0;
  slot->has_tag = false;
  slot->has_credit = false;
  slot->traffic = nullptr;
  if (!slot->label.empty()) slot->label.clear();
  slot->posted_ns = 0;
  slot->has_waited = false;
  slot->has_deadline = false;
  slot->after = 0;
  if (slot->has_failed()) slot->clear_failure();
  if (const std::uint32_t place = this_thread_place();
      place < kThreadPlaces && slot->runs.capacity() <= kMostOwnRuns) {
    Own& own = own_[place];
    if (own.count < own.free.size()) {
      own.free[own.count++] = slot;
      return;
    }
  }
  give_back_shared(slot);
}

void OperationPool::give_back_shared(OperationSlot* slot) {
  std::vector<Run> dropped;  // Let go of after the lock.
  const MutexLock lock(mutex_);
  if (kept_runs_ + slot->runs.capacity() > kMostKeptRuns) dropped.swap(slot->runs);
  kept_runs_ += slot->runs.capacity();
  free_.push_back(slot);
}

}  // namespace kvzc

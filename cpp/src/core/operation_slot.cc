#include "core/operation_slot.h"

#include "core/binding.h"

namespace kvzc {
namespace {

// Slots that once carried huge operations do not keep their lists for ever: all together have room for
// so many runs, 24 MB. Making a list anew costs more than filling it.
constexpr std::size_t kMostKeptRuns = 1 << 20;

}  // namespace

OperationSlot* OperationPool::take() {
  OperationSlot* slot = nullptr;
  {
    const MutexLock lock(mutex_);
    if (free_.empty()) {
      all_.push_back(std::make_unique<OperationSlot>());
      slot = all_.back().get();
      free_.reserve(all_.size());
    } else {
      slot = free_.back();
      free_.pop_back();
      kept_runs_ -= slot->runs.capacity();
    }
  }
  slot->retain();
  return slot;
}

void OperationPool::give_back(OperationSlot* slot) {
  slot->pins.clear();
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
  slot->label.clear();
  slot->posted_ns = 0;
  slot->has_waited = false;
  slot->has_deadline = false;
  slot->after = 0;
  slot->clear_failure();
  std::vector<Run> dropped;  // Let go of after the lock.
  const MutexLock lock(mutex_);
  if (kept_runs_ + slot->runs.capacity() > kMostKeptRuns) dropped.swap(slot->runs);
  kept_runs_ += slot->runs.capacity();
  free_.push_back(slot);
}

}  // namespace kvzc

#include "core/operation_slot.h"

#include "core/binding.h"

namespace kvzc {
namespace {

// A slot that once carried a huge operation does not keep its lists for ever.
constexpr std::size_t kRunsKept = 4096;

}  // namespace

OperationSlot* OperationPool::take() {
  OperationSlot* slot = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (free_.empty()) {
      all_.push_back(std::make_unique<OperationSlot>());
      slot = all_.back().get();
      free_.reserve(all_.size());
    } else {
      slot = free_.back();
      free_.pop_back();
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
  if (slot->runs.capacity() > kRunsKept) slot->runs.shrink_to_fit();
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
  std::lock_guard lock(mutex_);
  free_.push_back(slot);
}

}  // namespace kvzc

#include "core/deadlines.h"

namespace kvzc {

bool Deadlines::add(OperationSlot& slot, std::int64_t deadline_ns) {
  const MutexLock lock(mutex_);
  const auto place = slots_.emplace(deadline_ns, &slot);
  slot.deadline = place;
  slot.has_deadline = true;
  return place == slots_.begin();
}

void Deadlines::remove(OperationSlot& slot) {
  if (!slot.has_deadline) return;
  const MutexLock lock(mutex_);
  if (slot.deadline) slots_.erase(*slot.deadline);
  slot.deadline.reset();
  slot.has_deadline = false;
}

std::vector<OperationSlot*> Deadlines::take_due(std::int64_t now_ns) {
  std::vector<OperationSlot*> due;
  const MutexLock lock(mutex_);
  while (!slots_.empty() && slots_.begin()->first <= now_ns) {
    OperationSlot* const slot = slots_.begin()->second;
    slot->retain();  // It has not ended: its running reference holds it until here.
    slot->deadline.reset();
    slots_.erase(slots_.begin());
    due.push_back(slot);
  }
  return due;
}

std::int64_t Deadlines::next() const {
  const MutexLock lock(mutex_);
  return slots_.empty() ? INT64_MAX : slots_.begin()->first;
}

}  // namespace kvzc

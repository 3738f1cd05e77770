// Deadlines: the running transfers that are to be cancelled at a certain time.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "core/operation_slot.h"

namespace kvzc {

// Thread: any.
class Deadlines {
 public:
  // Gives whether it is now the earliest, so that somebody has to wake for it.
  bool add(OperationSlot& slot, std::int64_t deadline_ns);
  // Call when the transfer ends. Does nothing for one without a deadline.
  void remove(OperationSlot& slot);
  // Gives those whose time has come, each with a reference for the caller.
  std::vector<OperationSlot*> take_due(std::int64_t now_ns);
  // Gives the earliest deadline, or INT64_MAX.
  std::int64_t next() const;

 private:
  mutable Mutex mutex_;  // Guards the rest, and the slots' own places in it.
  std::multimap<std::int64_t, OperationSlot*> slots_ KVZC_GUARDED_BY(mutex_);
};

}  // namespace kvzc

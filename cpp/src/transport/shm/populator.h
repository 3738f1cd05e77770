// Populator: has the kernel fill in the page tables of memory that was mapped, before anybody writes
// there. The first touch of a page costs several times what copying it does.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "transport/shm/peer_memory.h"

namespace kvzc::shm {

class Populator {
 public:
  Populator() = default;
  ~Populator() { stop(); }
  Populator(const Populator&) = delete;
  Populator& operator=(const Populator&) = delete;

  // Has the memory populated soon, on a thread of low priority that starts with the first one. Memory
  // that goes meanwhile is left alone. Where the kernel cannot (before Linux 5.14), or no thread is
  // left, nothing happens: the first touch does it. Thread: any.
  void add(std::weak_ptr<const MappedMemory> memory);
  // Ends the thread within about a millisecond. Thread: any, once or more.
  void stop();

 private:
  void run();

  Mutex mutex_;  // Guards the rest.
  std::condition_variable_any has_work_;
  std::deque<std::weak_ptr<const MappedMemory>> queue_ KVZC_GUARDED_BY(mutex_);
  std::thread thread_ KVZC_GUARDED_BY(mutex_);
  bool is_stopping_ KVZC_GUARDED_BY(mutex_) = false;
};

}  // namespace kvzc::shm

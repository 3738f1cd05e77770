// Populator: has the kernel fill in the page tables of memory that was mapped, before anybody writes
// there. The first touch of a page costs several times what copying it does.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

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

  std::mutex mutex_;  // Guards the rest.
  std::condition_variable has_work_;
  std::deque<std::weak_ptr<const MappedMemory>> queue_;
  std::thread thread_;
  bool is_stopping_ = false;
};

}  // namespace kvzc::shm

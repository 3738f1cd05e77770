// CopyPool: the few threads that copy what is too large for the caller to copy alone.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "kvzc/transport.h"

namespace kvzc::shm {

class CopyPool {
 public:
  CopyPool(std::uint32_t threads, OperationSink& operations);
  ~CopyPool() { (void)stop(INT64_MAX); }

  // Queues an operation whose chunks are cut. Borrows it until it is retired: the pool holds a
  // reference while a thread looks at it. Starts the threads at first use. Thread: any.
  void submit(Operation& operation);
  // Finishes what is queued and ends the threads; gives whether they have ended by the deadline. If
  // not, the pool must stay for ever. Thread: any, once.
  bool stop(std::int64_t deadline_ns);

 private:
  void run();
  void start_threads() KVZC_REQUIRES(mutex_);

  const std::uint32_t thread_count_;
  OperationSink& operations_;
  // Shared by callers and copy threads; all guarded by mutex_.
  Mutex mutex_;
  std::condition_variable_any has_work_;
  std::deque<Operation*> queue_ KVZC_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ KVZC_GUARDED_BY(mutex_);
  std::size_t running_ KVZC_GUARDED_BY(mutex_) = 0;  // Of these, those that have not ended.
  std::condition_variable_any has_ended_;
  bool is_stopping_ KVZC_GUARDED_BY(mutex_) = false;
};

}  // namespace kvzc::shm

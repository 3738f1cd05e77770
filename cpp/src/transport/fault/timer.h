// Timer: one thread that does things later.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>

#include "base/mutex.h"
#include "kvzc/status.h"

namespace kvzc::fault {

class Timer {
 public:
  using Task = std::function<void()>;

  ~Timer() { stop(); }

  // Errors: kLimitExceeded.
  Status start();
  // Gives false, and keeps nothing, when no thread runs (any more): then it does not come to it.
  // Thread: any.
  bool run_at(std::int64_t at_ns, const void* owner, Task task);
  // Drops what `owner` asked for and returns when nothing of it runs. Thread: any; on the timer's
  // own it does not wait, for then the caller is what runs.
  void forget(const void* owner);
  // Drops everything and ends the thread. Thread: any, one at a time, not the timer's own.
  void stop();

 private:
  struct Entry {
    const void* owner;
    Task task;
  };

  void run();

  Mutex mutex_;  // Guards all of the rest.
  std::condition_variable_any has_changed_;
  std::condition_variable_any has_run_;
  std::multimap<std::int64_t, Entry> entries_ KVZC_GUARDED_BY(mutex_);  // By the time at which each is due.
  const void* running_ KVZC_GUARDED_BY(mutex_) = nullptr;               // The owner of the task that runs.
  bool is_running_ KVZC_GUARDED_BY(mutex_) = false;
  std::thread thread_ KVZC_GUARDED_BY(mutex_);
  std::thread::id thread_id_ KVZC_GUARDED_BY(mutex_);  // Known also while stop() waits for it.
};

}  // namespace kvzc::fault

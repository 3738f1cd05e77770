#include "transport/fault/timer.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace kvzc::fault {
namespace {

// Sleeping is cut at this, so that no time is too far away for the clock's arithmetic.
constexpr std::int64_t kLongestSleepNs = 3'600'000'000'000;

}  // namespace

Status Timer::start() {
  const MutexLock lock(mutex_);
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
    is_running_ = true;
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!is_running_) {
    return Status(Code::kLimitExceeded,
                  "no thread is left to make trouble; raise the limit (ulimit -u, or the "
                  "container's pids.max)");
  }
  pthread_setname_np(thread_.native_handle(), "kvzc-fault");
  return Status::ok();
}

bool Timer::run_at(std::int64_t at_ns, const void* owner, Task task) {
  const MutexLock lock(mutex_);
  if (!is_running_) return false;
  const auto added = entries_.insert({at_ns, {owner, std::move(task)}});
  if (added == entries_.begin()) has_changed_.notify_one();
  return true;
}

void Timer::forget(const void* owner) {
  std::vector<Task> dropped;  // Let go of after the lock.
  UniqueLock lock(mutex_);
  const auto drop = [&]() KVZC_REQUIRES(mutex_) {
    for (auto at = entries_.begin(); at != entries_.end();) {
      if (at->second.owner == owner) {
        dropped.push_back(std::move(at->second.task));
        at = entries_.erase(at);
      } else {
        ++at;
      }
    }
  };
  drop();
  if (thread_id_ == std::this_thread::get_id()) return;
  has_run_.wait(lock, [&]() KVZC_REQUIRES(mutex_) { return running_ != owner; });
  drop();  // What it asked for while it ran.
}

void Timer::stop() {
  std::multimap<std::int64_t, Entry> dropped;
  std::thread thread;
  {
    const MutexLock lock(mutex_);
    is_running_ = false;
    dropped.swap(entries_);
    thread.swap(thread_);
    has_changed_.notify_one();
  }
  if (thread.joinable()) thread.join();
}

void Timer::run() {
  UniqueLock lock(mutex_);
  thread_id_ = std::this_thread::get_id();
  while (is_running_) {
    if (entries_.empty()) {
      has_changed_.wait(lock);
      continue;
    }
    const std::int64_t left = entries_.begin()->first - now_ns();
    if (left > 0) {
      has_changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left, kLongestSleepNs)));
      continue;
    }
    auto entry = entries_.extract(entries_.begin());
    running_ = entry.mapped().owner;
    lock.unlock();
    entry.mapped().task();
    entry = {};
    lock.lock();
    running_ = nullptr;
    has_run_.notify_all();
  }
}

}  // namespace kvzc::fault

#include "transport/shm/copy_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/clock.h"

namespace kvzc::shm {
namespace {

constexpr std::int64_t kMostWaitNs = 3'600'000'000'000;  // Longer ones wrap in the library.

std::uint32_t default_thread_count() {
  return std::clamp(std::thread::hardware_concurrency(), 2u, 5u) - 1;
}

}  // namespace

CopyPool::CopyPool(std::uint32_t threads, OperationSink& operations)
    : thread_count_(threads != 0 ? threads : default_thread_count()), operations_(operations) {}

void CopyPool::submit(Operation& operation) {
  UniqueLock lock(mutex_);
  if (!is_stopping_) start_threads();
  bool is_queued = !is_stopping_ && !threads_.empty();
  try {
    if (is_queued) queue_.push_back(&operation);
  } catch (const std::bad_alloc&) {
    is_queued = false;
  }
  if (!is_queued) {
    // There is no thread for it, or no room: the caller is slower, but gets there.
    lock.unlock();
    operation.channel.load(std::memory_order_acquire)->help(operation, INT64_MAX);
    return;
  }
  // The queue's own reference: the operation may end, by a helper, before a thread gets to it.
  operations_.retain(operation);
  if (operation.chunks.size() > 1) {
    has_work_.notify_all();
  } else {
    has_work_.notify_one();
  }
}

// Gives as many threads as there may be: a limit on threads makes copies slower, no more.
void CopyPool::start_threads() {
  if (threads_.size() == thread_count_) return;
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    threads_.reserve(thread_count_);
    while (threads_.size() < thread_count_) {
      threads_.emplace_back([this] { run(); });
      ++running_;
      pthread_setname_np(threads_.back().native_handle(), "kvzc-copy");
    }
  } catch (const std::exception&) {  // No thread, or no memory for one.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void CopyPool::run() {
  UniqueLock lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [this]() KVZC_REQUIRES(mutex_) { return is_stopping_ || !queue_.empty(); });
    if (queue_.empty()) {
      --running_;
      has_ended_.notify_all();
      return;
    }
    Operation& operation = *queue_.front();
    operations_.retain(operation);
    lock.unlock();
    // All threads work on the oldest operation until every chunk of it is begun.
    operation.channel.load(std::memory_order_acquire)->help(operation, INT64_MAX);
    lock.lock();
    if (!queue_.empty() && queue_.front() == &operation) {
      queue_.pop_front();
      lock.unlock();
      operations_.release(operation);
      operations_.release(operation);
    } else {
      lock.unlock();
      operations_.release(operation);
    }
    lock.lock();
  }
}

bool CopyPool::stop(std::int64_t deadline_ns) {
  UniqueLock lock(mutex_);
  is_stopping_ = true;
  has_work_.notify_all();
  bool have_ended = running_ == 0;
  while (!have_ended) {
    const std::int64_t left = std::min(deadline_ns - now_ns(), kMostWaitNs);
    if (left <= 0) break;
    has_ended_.wait_for(lock, std::chrono::nanoseconds(left));
    have_ended = running_ == 0;
  }
  std::vector<std::thread> threads = std::move(threads_);
  lock.unlock();
  for (std::thread& thread : threads) {
    have_ended ? thread.join() : thread.detach();
  }
  return have_ended;
}

}  // namespace kvzc::shm

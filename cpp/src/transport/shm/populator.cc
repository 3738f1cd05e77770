#include "transport/shm/populator.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/process.h"

namespace kvzc::shm {
namespace {

#if defined(MADV_POPULATE_WRITE)
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Older C libraries do not name it.
#endif

// So much at once: about a millisecond, for which the memory cannot go and stop() waits.
constexpr std::uint64_t kSliceBytes = 2u << 20;

}  // namespace

void Populator::add(std::weak_ptr<const MappedMemory> memory) {
  const MutexLock lock(mutex_);
  if (is_stopping_) return;
  queue_.push_back(std::move(memory));
  if (!thread_.joinable()) {
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread([this] { run(); });
      pthread_setname_np(thread_.native_handle(), "kvzc-populate");
    } catch (const std::exception&) {  // No thread, or no memory for one.
      queue_.clear();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  has_work_.notify_one();
}

void Populator::run() {
  // Whoever copies or computes goes first.
  (void)setpriority(PRIO_PROCESS, this_thread_number(), 10);
  UniqueLock lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [this]() KVZC_REQUIRES(mutex_) { return is_stopping_ || !queue_.empty(); });
    if (is_stopping_) return;
    const std::weak_ptr<const MappedMemory> memory = std::move(queue_.front());
    queue_.pop_front();
    std::uint64_t done = 0;
    while (!is_stopping_) {
      lock.unlock();
      bool is_over = true;
      // Held for one slice: whoever lets go of it meanwhile does not wait for the rest.
      if (const std::shared_ptr<const MappedMemory> held = memory.lock()) {
        const std::uint64_t nbytes = std::min(kSliceBytes, held->nbytes() - done);
        is_over = nbytes == 0 || madvise(held->data() + done, nbytes, kPopulateWrite) != 0;
        done += nbytes;
      }
      lock.lock();
      if (is_over) break;
    }
  }
}

void Populator::stop() {
  std::thread thread;
  {
    const MutexLock lock(mutex_);
    is_stopping_ = true;
    has_work_.notify_one();
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
}

}  // namespace kvzc::shm

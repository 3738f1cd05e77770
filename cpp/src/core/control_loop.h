// ControlLoop: the engine's one control thread. Descriptors, timers, and tasks from other threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "kvzc/status.h"

namespace kvzc {

class ControlLoop {
 public:
  using Task = std::function<void()>;
  using Handler = std::function<void(std::uint32_t events)>;

  ControlLoop() = default;
  ~ControlLoop() { stop(); }
  ControlLoop(const ControlLoop&) = delete;
  ControlLoop& operator=(const ControlLoop&) = delete;

  Status start();
  // Runs what was posted before, then ends the thread. Idempotent. Thread: any but the loop's.
  void stop();

  // Runs `task` on the loop's thread, soon. Gives false, and does not, once stop() was called.
  // Thread: any.
  bool post(Task task);

  // --- Thread: the loop's, or before start(). ---

  Status watch(int fd, std::uint32_t events, Handler handler);
  void change(int fd, std::uint32_t events);
  void unwatch(int fd);
  void run_at(std::int64_t when_ns, Task task);

 private:
  void run();
  void run_posted();
  int next_timeout_ms() const;

  OwnedFd epoll_;
  OwnedFd wake_;
  std::thread thread_;
  // One that is watched; the number tells it from those that had the descriptor before.
  struct Watched {
    Handler handler;
    std::uint32_t number = 0;
  };
  std::unordered_map<int, Watched> watched_;
  std::uint32_t next_number_ = 0;
  std::multimap<std::int64_t, Task> timers_;

  // Shared with the threads that post; guarded by mutex_.
  Mutex mutex_;
  std::vector<Task> posted_ KVZC_GUARDED_BY(mutex_);
  bool is_stopping_ KVZC_GUARDED_BY(mutex_) = false;
};

}  // namespace kvzc

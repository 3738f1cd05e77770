#include "core/control_loop.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <system_error>

#include "base/clock.h"

namespace kvzc {

namespace {

epoll_event event_of(int fd, std::uint32_t number, std::uint32_t events) {
  epoll_event out{};
  out.events = events;
  out.data.u64 = std::uint64_t{number} << 32 | static_cast<std::uint32_t>(fd);
  return out;
}

}  // namespace

Status ControlLoop::start() {
  epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.is_valid() || !wake_.is_valid()) {
    return too_many_files("making an engine");
  }
  Status watched = watch(wake_.get(), EPOLLIN, [this](std::uint32_t) {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof count);
  });
  if (!watched.is_ok()) return watched;
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return Status(Code::kLimitExceeded,
                  "no thread is left for an engine; raise the limit (ulimit -u, or the container's "
                  "pids.max)");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "kvzc-control");
  return Status::ok();
}

void ControlLoop::stop() {
  {
    const MutexLock lock(mutex_);
    is_stopping_ = true;
  }
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  thread_.join();
}

bool ControlLoop::post(Task task) {
  {
    const MutexLock lock(mutex_);
    if (is_stopping_) return false;
    posted_.push_back(std::move(task));
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  return true;
}

Status ControlLoop::watch(int fd, std::uint32_t events, Handler handler) {
  epoll_event event = event_of(fd, ++next_number_, events);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return Status::system(errno, "epoll_ctl");
  }
  watched_[fd] = {std::move(handler), next_number_};
  return Status::ok();
}

void ControlLoop::change(int fd, std::uint32_t events) {
  const auto found = watched_.find(fd);
  if (found == watched_.end()) return;
  epoll_event event = event_of(fd, found->second.number, events);
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void ControlLoop::unwatch(int fd) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  watched_.erase(fd);
}

void ControlLoop::run_at(std::int64_t when_ns, Task task) {
  timers_.emplace(when_ns, std::move(task));
}

int ControlLoop::next_timeout_ms() const {
  if (timers_.empty()) return -1;
  const std::int64_t left = timers_.begin()->first - now_ns();
  return static_cast<int>(std::clamp<std::int64_t>((left + 999'999) / 1'000'000, 0, 60'000));
}

void ControlLoop::run_posted() {
  std::vector<Task> tasks;
  {
    const MutexLock lock(mutex_);
    tasks.swap(posted_);
  }
  for (Task& task : tasks) task();
}

void ControlLoop::run() {
  for (;;) {
    std::array<epoll_event, 64> events;
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), next_timeout_ms());
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      // A handler may have unwatched a later one of this batch, and closed it, and another may have its
      // number by now: what was seen is not about that one.
      const auto found = watched_.find(static_cast<int>(event.data.u64 & 0xffffffff));
      if (found == watched_.end() || found->second.number != event.data.u64 >> 32) continue;
      const Handler handler = found->second.handler;  // A copy, since it may unwatch itself.
      handler(event.events);
    }
    // The time is read once: a timer that sets itself again must not keep the descriptors waiting.
    const std::int64_t now = now_ns();
    while (!timers_.empty() && timers_.begin()->first <= now) {
      const Task task = std::move(timers_.begin()->second);
      timers_.erase(timers_.begin());
      task();
    }
    run_posted();
    const MutexLock lock(mutex_);
    if (is_stopping_ && posted_.empty()) break;
  }
  // What they hold may refer back to the loop's owner.
  timers_.clear();
  watched_.clear();
}

}  // namespace kvzc

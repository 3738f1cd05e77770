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
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  thread_.join();
}

bool ControlLoop::post(Task task) {
  {
    std::lock_guard lock(mutex_);
    if (is_stopping_) return false;
    posted_.push_back(std::move(task));
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  return true;
}

Status ControlLoop::watch(int fd, std::uint32_t events, Handler handler) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return Status::system(errno, "epoll_ctl");
  }
  handlers_[fd] = std::move(handler);
  return Status::ok();
}

void ControlLoop::change(int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void ControlLoop::unwatch(int fd) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  handlers_.erase(fd);
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
    std::lock_guard lock(mutex_);
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
      // A handler may have unwatched a later one of this batch. A copy, since it may unwatch
      // itself.
      const auto found = handlers_.find(events[static_cast<std::size_t>(i)].data.fd);
      if (found == handlers_.end()) continue;
      const Handler handler = found->second;
      handler(events[static_cast<std::size_t>(i)].events);
    }
    // The time is read once: a timer that sets itself again must not keep the descriptors waiting.
    const std::int64_t now = now_ns();
    while (!timers_.empty() && timers_.begin()->first <= now) {
      const Task task = std::move(timers_.begin()->second);
      timers_.erase(timers_.begin());
      task();
    }
    run_posted();
    std::lock_guard lock(mutex_);
    if (is_stopping_ && posted_.empty()) break;
  }
  // What they hold may refer back to the loop's owner.
  timers_.clear();
  handlers_.clear();
}

}  // namespace kvzc

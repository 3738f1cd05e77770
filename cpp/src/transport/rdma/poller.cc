#include "transport/rdma/poller.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>

#include <system_error>

#include "base/clock.h"
#include "base/futex.h"
#include "transport/rdma/rdma_channel.h"

namespace kvzc::rdma {
namespace {

// After this long without a completion the thread sleeps until one comes.
constexpr std::int64_t kSpinNs = 20'000;
// A thread that waits has looked so lately that it will look again.
constexpr std::int64_t kHelpedNs = 200'000;
constexpr std::int64_t kNapNs = 100'000;

}  // namespace

Status Poller::start() {
  wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.is_valid()) return too_many_files("starting the rdma transport");
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status started;
  try {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "kvzc-rdma");
  } catch (const std::system_error&) {
    started = Status(Code::kLimitExceeded,
                     "no thread is left for the rdma transport; raise the limit (ulimit -u, or the "
                     "container's pids.max)");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void Poller::stop() {
  if (!thread_.joinable()) return;
  is_stopping_.store(true);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  thread_.join();
  settle();
}

int Poller::look() {
  Endings endings(operations_);
  int count = 0;
  for (const auto& rail : rails_) count += rail->poll(endings);
  return count;
}

int Poller::help() {
  helped_ns_.store(now_ns(), std::memory_order_relaxed);
  return look();
}

void Poller::settle() {
  int count = 0;
  do {
    Endings endings(operations_);
    count = 0;
    for (const auto& rail : rails_) count += rail->poll_surely(endings);
  } while (count > 0);
}

void Poller::run() {
  while (!is_stopping_.load(std::memory_order_relaxed)) {
    std::int64_t idle_since = now_ns();
    for (;;) {
      if (look() > 0) {
        idle_since = now_ns();
      } else if (now_ns() - idle_since > kSpinNs) {
        break;
      } else {
        cpu_relax();
      }
    }
    // Somebody waits and looks: a nap, and no event that would wake this thread for nothing.
    if (now_ns() - helped_ns_.load(std::memory_order_relaxed) < kHelpedNs) {
      const timespec nap{0, kNapNs};
      nanosleep(&nap, nullptr);
      continue;
    }
    sleep();
  }
}

void Poller::sleep() {
  for (const auto& rail : rails_) rail->arm();
  // What came before it was armed makes no event.
  {
    Endings endings(operations_);
    int count = 0;
    for (const auto& rail : rails_) count += rail->poll_surely(endings);
    if (count > 0) return;
  }
  std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
  for (const auto& rail : rails_) {
    fds.push_back({rail->events()->fd, POLLIN, 0});
    fds.push_back({rail->device().context()->async_fd, POLLIN, 0});
  }
  if (poll(fds.data(), fds.size(), -1) <= 0) return;
  for (std::size_t i = 0; i < rails_.size(); ++i) {
    if (fds[1 + 2 * i].revents != 0) rails_[i]->take_events();
    if (fds[2 + 2 * i].revents != 0) on_async_events(*rails_[i]);
  }
}

void Poller::on_async_events(Rail& rail) {
  const ibv::Verbs& verbs = rail.device().verbs();
  ibv_async_event event{};
  while (verbs.get_async_event(rail.device().context(), &event) == 0) {
    const ibv_event_type type = event.event_type;
    verbs.ack_async_event(&event);
    // What befell one queue pair shows in its completions.
    const bool is_fatal = type == IBV_EVENT_DEVICE_FATAL || type == IBV_EVENT_CQ_ERR;
    if (type != IBV_EVENT_PORT_ERR && !is_fatal) continue;
    Endings endings(operations_);
    std::lock_guard lock(channels_mutex_);
    for (RdmaChannel* channel : channels_) {
      channel->rail_is_down(rail.index(), verbs.event_type_str(type), is_fatal, endings);
    }
  }
}

void Poller::add(RdmaChannel* channel) {
  std::lock_guard lock(channels_mutex_);
  channels_.insert(channel);
}

void Poller::remove(RdmaChannel* channel) {
  std::lock_guard lock(channels_mutex_);
  channels_.erase(channel);
}

}  // namespace kvzc::rdma

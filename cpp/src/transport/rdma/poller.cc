#include "transport/rdma/poller.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>

#include <algorithm>
#include <system_error>

#include "base/clock.h"
#include "base/doorbell.h"
#include "base/futex.h"
#include "transport/rdma/rdma_channel.h"

namespace kvzc::rdma {
namespace {

// After this long without a completion the thread sleeps until one comes.
constexpr std::int64_t kSpinNs = 20'000;
// While somebody is active it looks once in so long for what was left alone: longer where it finds nothing.
constexpr std::int64_t kNapNs = 1'000'000;
constexpr std::int64_t kMostNapNs = 8'000'000;
// So often at most, one after the other, for what has come before events were asked for.
constexpr int kMostLooks = 64;
// Whoever was active counts as active for so long: between two marks the poller may well look twice, and
// an event that it asked for in between would cut into the next post.
constexpr std::int64_t kActiveNs = 2 * kMostNapNs;
constexpr std::int64_t kNever = INT64_MAX;

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
  wake();
  thread_.join();
  settle();
}

int Poller::look() {
  Endings endings(operations_);
  int count = 0;
  for (const auto& rail : rails_) count += rail->poll(endings);
  return count;
}

void Poller::add_sleeper() {
  // Either this sees the nap, or the poller sees the sleeper before it naps.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (is_napping_.exchange(false, std::memory_order_seq_cst)) wake();
}

void Poller::begin_rest() {
  // Either this sees that no event was asked for, or the poller sees that somebody rests.
  resting_.fetch_add(1, std::memory_order_seq_cst);
  see_to_messages();
}

void Poller::see_to_messages() {
  if (is_unarmed_.exchange(false, std::memory_order_seq_cst)) wake();
}

void Poller::settle() {
  while (look_surely()) {
  }
}

bool Poller::look_surely() {
  Endings endings(operations_);
  int count = 0;
  for (const auto& rail : rails_) count += rail->poll_surely(endings);
  return count > 0;
}

void Poller::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
}

void Poller::run() {
  while (!is_stopping_.load(std::memory_order_relaxed)) {
    if (now_ns() >= next_watch_ns_) watch();
    if (is_somebody_active()) {
      nap();
    } else {
      look_until_idle();
      sleep();
    }
  }
}

bool Poller::has_changed(const std::atomic<std::uint32_t>& marks, std::uint32_t& seen) {
  const std::uint32_t now = marks.load(std::memory_order_relaxed);
  return now != std::exchange(seen, now);
}

bool Poller::is_somebody_active() {
  const std::uint32_t seen = activity();
  const std::int64_t now = now_ns();
  if (seen != std::exchange(seen_activity_, seen)) active_until_ns_ = now + kActiveNs;
  return now < active_until_ns_ && sleepers_.load(std::memory_order_relaxed) == 0;
}

void Poller::look_until_idle() {
  std::int64_t idle_since = now_ns();
  for (;;) {
    const bool has_come = look() > 0;
    const std::int64_t now = now_ns();
    if (has_come) {
      idle_since = now;
    } else if (now - idle_since > kSpinNs) {
      return;
    }
    if (now >= next_watch_ns_) return;
    cpu_relax();
    if (activity() != seen_activity_) return;
  }
}

void Poller::sleep() {
  for (const auto& rail : rails_) (void)rail->arm(Rail::Events::kAll);
  // What came before it was armed makes no event.
  if (look_surely()) return;
  const std::int64_t next = next_watch_ns_;
  sleep_armed(next == kNever ? kNever : std::max<std::int64_t>(next - now_ns(), 0));
}

void Poller::nap() {
  const bool is_looked_for = has_changed(looks_, seen_looks_);
  const bool do_messages_come = has_changed(messages_, seen_messages_);
  if (is_looked_for && do_messages_come && nap_unarmed()) return;
  bool is_armed_anew = false;
  for (const auto& rail : rails_) is_armed_anew |= rail->arm(Rail::Events::kMessages);
  // What came before it was armed makes no event. Else a look would only take from whoever looks.
  bool has_come = false;
  for (int looks = 0; looks < kMostLooks && (is_armed_anew || !is_looked_for); ++looks) {
    if (!look_surely()) break;
    has_come = true;
  }
  const bool was_left_alone = has_come && !is_looked_for;
  // Whoever looked may have stopped just after: then only the nap after this one ends in a look.
  const std::int64_t most_ns = is_looked_for ? kMostNapNs / 2 : kMostNapNs;
  nap_ns_ = was_left_alone ? kNapNs : std::clamp(2 * nap_ns_, kNapNs, most_ns);
  if (!was_left_alone) doze();
}

// Those who look take the messages: each would wake this thread for nothing.
bool Poller::nap_unarmed() {
  is_unarmed_.store(true, std::memory_order_seq_cst);
  const bool is_sound =
      resting_.load(std::memory_order_seq_cst) == 0 && !doorbell_.is_event_armed();
  if (is_sound) {
    // No event ends it: an owner's question may have to wait for two of them.
    nap_ns_ = kNapNs;
    doze();
  }
  is_unarmed_.store(false, std::memory_order_relaxed);
  return is_sound;
}

void Poller::doze() {
  is_napping_.store(true, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) sleep_armed(nap_ns_);
  is_napping_.store(false, std::memory_order_relaxed);
}

void Poller::sleep_armed(std::int64_t timeout_ns) {
  std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
  for (const auto& rail : rails_) {
    fds.push_back({rail->events()->fd, POLLIN, 0});
    fds.push_back({rail->device().context()->async_fd, POLLIN, 0});
  }
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  const timespec* const limit = timeout_ns == kNever ? nullptr : &timeout;
  if (ppoll(fds.data(), fds.size(), limit, nullptr) <= 0) return;
  if (fds[0].revents != 0) {
    std::uint64_t wakes = 0;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &wakes, sizeof wakes);
  }
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
    const MutexLock lock(channels_mutex_);
    for (RdmaChannel* channel : channels_) {
      channel->rail_is_down(rail.index(), verbs.event_type_str(type), is_fatal, endings);
    }
  }
}

void Poller::watch() {
  Endings endings(operations_);
  const MutexLock lock(channels_mutex_);
  for (RdmaChannel* channel : channels_) channel->watch(endings);
  next_watch_ns_ = channels_.empty() ? kNever : now_ns() + RdmaChannel::kWatchNs;
}

void Poller::add(RdmaChannel* channel) {
  const MutexLock lock(channels_mutex_);
  channels_.insert(channel);
  if (next_watch_ns_ != kNever) return;  // Looks are counted: one that came early would count too.
  next_watch_ns_ = now_ns() + RdmaChannel::kWatchNs;
  wake();  // It may sleep without a limit.
}

void Poller::remove(RdmaChannel* channel) {
  const MutexLock lock(channels_mutex_);
  channels_.erase(channel);
}

}  // namespace kvzc::rdma

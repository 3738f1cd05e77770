#include "transport/rdma/rail.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <array>

namespace kvzc::rdma {
namespace {

constexpr int kFirstEntries = 4096;
constexpr int kLook = 32;
// The bit above it tells receives from sends.
constexpr std::uint32_t kNumberMask = 0x7fffffff;

}  // namespace

void Endings::retire_all() {
  for (std::size_t i = 0; i < count_; ++i) sink_.retire(*done_[i], Status::ok());
  for (auto& [operation, status] : more_) sink_.retire(*operation, std::move(status));
}

Result<std::unique_ptr<Rail>> Rail::open(std::shared_ptr<Device> device, std::size_t index) {
  std::unique_ptr<Rail> out(new Rail(std::move(device), index));
  const Device& on = *out->device_;
  out->events_ = on.verbs().create_comp_channel(on.context());
  if (out->events_ == nullptr) {
    return Status::system(errno, "a completion channel on " + on.info().name);
  }
  // Taking events must not wait where another thread was faster.
  for (const int fd : {out->events_->fd, on.context()->async_fd}) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  }
  out->queue_ = on.verbs().create_cq(on.context(), std::min(kFirstEntries, on.limits().max_cqe),
                                     nullptr, out->events_, 0);
  if (out->queue_ == nullptr) {
    return Status::system(errno, "a completion queue on " + on.info().name);
  }
  return out;
}

Rail::~Rail() {
  const ibv::Verbs& verbs = device_->verbs();
  if (queue_ != nullptr) {
    if (events_to_acknowledge_ > 0) verbs.ack_cq_events(queue_, events_to_acknowledge_);
    verbs.destroy_cq(queue_);
  }
  if (events_ != nullptr) verbs.destroy_comp_channel(events_);
}

Result<std::uint32_t> Rail::add(CompletionTarget* target, std::uint32_t completions) {
  const MutexLock lock(poll_mutex_);
  // A queue that overflows is lost with all queue pairs on it.
  const std::uint32_t needed = reserved_ + completions;
  if (needed > static_cast<std::uint32_t>(queue_->cqe)) {
    const auto most = static_cast<std::uint32_t>(device_->limits().max_cqe);
    if (needed > most ||
        device_->verbs().resize_cq(queue_, static_cast<int>(std::min(most, 2 * needed))) != 0) {
      return Status(Code::kLimitExceeded,
                    device_->info().name + ": the completion queue holds " +
                        std::to_string(queue_->cqe) + " entries and cannot grow to " +
                        std::to_string(needed) +
                        "; connect fewer peers, or lower RdmaOptions::queue_depth");
    }
  }
  reserved_ = needed;
  targets_[next_number_] = target;
  return next_number_++;
}

void Rail::hand_over(std::uint32_t number, CompletionTarget* target) {
  const MutexLock lock(poll_mutex_);
  targets_[number] = target;
  last_number_ = 0;
}

void Rail::remove(std::uint32_t number, std::uint32_t completions) {
  const MutexLock lock(poll_mutex_);
  if (targets_.erase(number) != 0) reserved_ -= completions;
  last_number_ = 0;
}

int Rail::poll(Endings& endings) {
  if (!poll_mutex_.try_lock()) return 0;
  const MutexLock lock(poll_mutex_, kIsHeld);
  return poll_locked(endings);
}

int Rail::poll_surely(Endings& endings) {
  const MutexLock lock(poll_mutex_);
  return poll_locked(endings);
}

int Rail::poll_locked(Endings& endings) {
  std::array<ibv_wc, kLook> completions;
  const int count = ibv_poll_cq(queue_, kLook, completions.data());
  const auto number_of = [&](std::size_t i) {
    return static_cast<std::uint32_t>(completions[i].wr_id >> 32) & kNumberMask;
  };
  // What follows each other for one queue pair is told at once.
  const auto end = static_cast<std::size_t>(std::max(count, 0));
  for (std::size_t at = 0, next = 0; at < end; at = next) {
    while (++next < end && number_of(next) == number_of(at)) {
    }
    if (number_of(at) != last_number_) {
      const auto found = targets_.find(number_of(at));
      if (found == targets_.end()) continue;  // Its channel is gone.
      last_number_ = number_of(at);
      last_target_ = found->second;
    }
    last_target_->on_completions(index_, {&completions[at], next - at}, endings);
  }
  return static_cast<int>(end);
}

bool Rail::arm(Events kind) {
  // What is armed for all is armed for messages too.
  if (kind <= armed_) return false;
  armed_ = kind;
  ibv_req_notify_cq(queue_, kind == Events::kMessages);
  return true;
}

void Rail::take_events() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  armed_ = Events::kNone;
  while (device_->verbs().get_cq_event(events_, &queue, &context) == 0) {
    // Acknowledged in bulk: each acknowledgement takes a lock.
    if (++events_to_acknowledge_ >= 64) {
      device_->verbs().ack_cq_events(queue_, std::exchange(events_to_acknowledge_, 0u));
    }
  }
}

}  // namespace kvzc::rdma

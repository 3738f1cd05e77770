#include "core/binding.h"

#include <algorithm>

#include "base/clock.h"
#include "core/endpoint.h"

namespace kvzc {
namespace {

// All their tags together fit into an empty ring of the default size.
constexpr std::size_t kMostWaiting = 1024;

}  // namespace

Binding::Next Binding::enter(OperationSlot& operation, std::shared_ptr<const Resolved>* resolved,
                             Status* why) {
  const MutexLock lock(mutex_);
  switch (state_) {
    case State::kReady:
      if (resolved_->endpoint->is_lost()) {
        *why = resolved_->endpoint->why();
        return Next::kFail;
      }
      *resolved = resolved_;
      return Next::kPost;
    case State::kFailed:
      if (now_ns() < retry_ns_) {
        *why = why_;
        return Next::kFail;
      }
      state_ = State::kNew;
      break;
    case State::kNew:
    case State::kResolving:
      break;
  }
  // Whoever failed it may have looked for it here before.
  if (operation.has_failed()) {
    if (!operation.has_tag || orphans_.size() >= kMostWaiting) return Next::kEnded;
    orphans_.push_back({operation.tag, operation.failure().code()});
    if (state_ == State::kResolving) return Next::kEnded;
    state_ = State::kResolving;
    return Next::kEndedStart;
  }
  if (waiting_.size() >= kMostWaiting) return Next::kFull;
  waiting_.push_back(&operation);
  if (state_ == State::kResolving) return Next::kWait;
  state_ = State::kResolving;
  return Next::kStart;
}

std::shared_ptr<const Binding::Resolved> Binding::resolved() const {
  const MutexLock lock(mutex_);
  return resolved_;
}

Status Binding::failure() const {
  const MutexLock lock(mutex_);
  if (state_ == State::kReady && resolved_->endpoint->is_lost()) return resolved_->endpoint->why();
  return state_ == State::kFailed && now_ns() < retry_ns_ ? why_ : Status::ok();
}

std::vector<OperationSlot*> Binding::resolve(std::shared_ptr<const Resolved> resolved) {
  std::vector<OperationSlot*> waited;
  {
    const MutexLock lock(mutex_);
    // The engine closed meanwhile.
    if (state_ == State::kFailed && retry_ns_ == kNever) return {};
    part_from_resolved();
    state_ = State::kReady;
    resolved_ = std::move(resolved);
    ready_.store(resolved_.get(), std::memory_order_seq_cst);
    waited.swap(waiting_);
  }
  drop_parted();
  return waited;
}

std::vector<OperationSlot*> Binding::fail(Status why, std::int64_t retry_ns) {
  std::vector<OperationSlot*> waited;
  {
    const MutexLock lock(mutex_);
    if (state_ == State::kFailed && retry_ns_ == kNever) return {};
    part_from_resolved();
    state_ = State::kFailed;
    why_ = std::move(why);
    retry_ns_ = retry_ns;
    waited.swap(waiting_);
  }
  drop_parted();
  return waited;
}

void Binding::part_from_resolved() {
  if (!resolved_) return;
  parted_.push_back(resolved_);  // First: it may throw, and then nothing has changed.
  ready_.store(nullptr, std::memory_order_seq_cst);
  resolved_.reset();
  has_parted_.store(true, std::memory_order_seq_cst);
}

void Binding::drop_parted() {
  std::vector<std::shared_ptr<const Resolved>> dropped;  // Let go of after the lock.
  const MutexLock lock(mutex_);
  if (has_visitors()) return;  // The last one of them comes here.
  dropped.swap(parted_);
  has_parted_.store(false, std::memory_order_seq_cst);
}

bool Binding::withdraw(OperationSlot& operation, Code why) {
  const MutexLock lock(mutex_);
  const auto at = std::find(waiting_.begin(), waiting_.end(), &operation);
  if (at == waiting_.end()) return false;
  waiting_.erase(at);
  if (operation.has_tag && orphans_.size() < kMostWaiting) {
    orphans_.push_back({operation.tag, why});
  }
  return true;
}

std::vector<Binding::Orphan> Binding::take_orphans() {
  const MutexLock lock(mutex_);
  return std::exchange(orphans_, {});
}

}  // namespace kvzc

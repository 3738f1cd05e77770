// Rail: one device with the completion queue that all its queue pairs share.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/short_mutex.h"
#include "kvzc/transport.h"
#include "transport/rdma/device.h"

namespace kvzc::rdma {

// Operations that are over, to be retired when no lock is held any more. Mostly it is one that went
// well, and that costs nothing here.
class Endings {
 public:
  explicit Endings(OperationSink& sink) : sink_(sink) {}
  ~Endings() {
    if (count_ > 0 || !more_.empty()) retire_all();
  }
  Endings(const Endings&) = delete;
  Endings& operator=(const Endings&) = delete;

  void add(Operation& operation, Status status) {
    if (status.is_ok() && count_ < done_.size() && more_.empty()) {
      done_[count_++] = &operation;
    } else {
      more_.emplace_back(&operation, std::move(status));
    }
  }

 private:
  void retire_all();

  OperationSink& sink_;
  std::size_t count_ = 0;
  std::array<Operation*, 16> done_;
  std::vector<std::pair<Operation*, Status>> more_;
};

// Who is told of completions. Called with the rail's poll lock held.
class CompletionTarget {
 public:
  virtual ~CompletionTarget() = default;
  virtual void on_completions(std::size_t rail, std::span<const ibv_wc> completions,
                              Endings& endings) = 0;
};

class Rail {
 public:
  static Result<std::unique_ptr<Rail>> open(std::shared_ptr<Device> device, std::size_t index);
  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  Device& device() const { return *device_; }
  const std::shared_ptr<Device>& shared_device() const { return device_; }
  std::size_t index() const { return index_; }
  ibv_cq* queue() const { return queue_; }
  ibv_comp_channel* events() const { return events_; }

  // Makes room for the completions of one more queue pair and names it: the number stands in the
  // upper half of the wr_id of all its requests. Errors: kLimitExceeded. Thread: any.
  Result<std::uint32_t> add(CompletionTarget* target, std::uint32_t completions);
  // Completions of `number` go to another target from now on.
  void hand_over(std::uint32_t number, CompletionTarget* target);
  // From its return `target` is not called any more for it. Requires: not called by the target.
  void remove(std::uint32_t number, std::uint32_t completions);

  // Hands on what has completed; gives how many. 0 at once when another thread is at it.
  int poll(Endings& endings);
  // The same, but waits for such a thread.
  int poll_surely(Endings& endings);
  enum class Events { kNone, kMessages, kAll };
  // The next message that comes in, or the next completion of any kind, makes the event channel
  // readable. Costs nothing where it was asked for already; gives whether it was not. Thread: the
  // poller's.
  bool arm(Events kind);
  void take_events();

 private:
  Rail(std::shared_ptr<Device> device, std::size_t index)
      : device_(std::move(device)), index_(index) {}
  inline int poll_locked(Endings& endings) KVZC_REQUIRES(poll_mutex_);

  const std::shared_ptr<Device> device_;
  const std::size_t index_;
  ibv_comp_channel* events_ = nullptr;
  ibv_cq* queue_ = nullptr;
  Events armed_ = Events::kNone;  // The poller's own, ...
  unsigned events_to_acknowledge_ = 0;  // ... and so is this.

  ShortMutex poll_mutex_;  // Guards the rest, and polling.
  std::unordered_map<std::uint32_t, CompletionTarget*> targets_ KVZC_GUARDED_BY(poll_mutex_);
  // Whose completions came last, 0 for nobody's, and its target: mostly the next are its, too.
  std::uint32_t last_number_ KVZC_GUARDED_BY(poll_mutex_) = 0;
  CompletionTarget* last_target_ KVZC_GUARDED_BY(poll_mutex_) = nullptr;
  std::uint32_t next_number_ KVZC_GUARDED_BY(poll_mutex_) = 1;
  std::uint32_t reserved_ KVZC_GUARDED_BY(poll_mutex_) = 0;
};

}  // namespace kvzc::rdma

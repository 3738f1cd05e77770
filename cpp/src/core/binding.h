// Binding: one grant as this engine can use it. Operations wait here until it is resolved.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "core/operation_slot.h"
#include "kvzc/handle.h"
#include "kvzc/transport.h"

namespace kvzc {

class Endpoint;
struct PeerTraffic;

class Binding : public std::enable_shared_from_this<Binding> {
 public:
  // Everything that an operation through the grant needs; constant, shared by those that run.
  struct Resolved : std::enable_shared_from_this<Resolved> {
    std::shared_ptr<Endpoint> endpoint;
    Channel* channel = nullptr;
    const char* transport = nullptr;
    PeerTraffic* traffic = nullptr;  // The endpoint keeps it.
    std::vector<std::shared_ptr<RemoteMemory>> memories;  // One per storage of the handle.
    std::vector<std::uint64_t> storage_ids;
    FenceTicket fence;
    // The better transports that cannot be used here, and why: for explain().
    std::vector<std::pair<std::string, std::string>> passed_over;
  };

  explicit Binding(HandleInfo info) : info_(std::move(info)) {}
  const HandleInfo& info() const { return info_; }

  // What a new operation does that a Visit has found no way for. Thread: any.
  enum class Next {
    kPost,   // `resolved` is filled in: it has been resolved since.
    kWait,   // It was queued; the grant is being resolved.
    kStart,  // It was queued, and the caller must have the grant resolved.
    kFail,   // `why` is filled in.
    // It has failed already, by a deadline for instance. Its tag is kept; it is the caller's to
    // retire, and then to have the grant resolved.
    kEnded,
    kEndedStart,
    kFull,   // Too many wait already; it was not queued.
  };
  Next enter(OperationSlot& operation, std::shared_ptr<const Resolved>* resolved, Status* why);
  // Gives the resolved form, or null.
  std::shared_ptr<const Resolved> resolved() const;

  // A look at the resolved form, which stays as long as the look lasts; who needs it longer shares it.
  // Thread: any. Cost: no lock, two atomic additions.
  class Visit {
   public:
    explicit Visit(Binding& binding) : binding_(binding) {
      // Before the look, and both sequentially consistent: whoever takes the form away and then counts
      // the visitors counts this one, or was seen by it.
      binding_.visitors_.fetch_add(1, std::memory_order_seq_cst);
      resolved_ = binding_.ready_.load(std::memory_order_seq_cst);
    }
    ~Visit() {
      if (binding_.visitors_.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
          binding_.has_parted_.load(std::memory_order_seq_cst)) {
        binding_.drop_parted();
      }
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    // Null: it is not resolved, or has failed.
    const Resolved* resolved() const { return resolved_; }

   private:
    Binding& binding_;
    const Resolved* resolved_;
  };
  bool has_visitors() const { return visitors_.load(std::memory_order_seq_cst) != 0; }

  // Says why nothing goes through it, or ok.
  Status failure() const;

  // Ends the waiting. The operations are the caller's to post or retire. Thread: control.
  std::vector<OperationSlot*> resolve(std::shared_ptr<const Resolved> resolved);
  // Operations fail with `why` until then; the next one tries again. kNever: it is final.
  static constexpr std::int64_t kAtOnce = 0, kNever = INT64_MAX;
  std::vector<OperationSlot*> fail(Status why, std::int64_t retry_ns);
  // Takes one waiting operation out, if it is still there; its tag stays, and says `why`.
  // Thread: any.
  bool withdraw(OperationSlot& operation, Code why);

  // A tag whose operation ended before it could be sent.
  struct Orphan {
    Tag tag;
    Code code = Code::kOk;
  };
  std::vector<Orphan> take_orphans();

 private:
  enum class State { kNew, kResolving, kReady, kFailed };

  // Keeps the form for those who may look at it, and lets nobody else see it.
  void part_from_resolved() KVZC_REQUIRES(mutex_);
  // Lets go of the forms that visitors may have seen, if there are none now.
  void drop_parted();

  const HandleInfo info_;
  std::atomic<const Resolved*> ready_{nullptr};  // resolved_, while it is good.
  std::atomic<std::uint32_t> visitors_{0};
  std::atomic<bool> has_parted_{false};
  mutable Mutex mutex_;  // Guards the rest.
  State state_ KVZC_GUARDED_BY(mutex_) = State::kNew;
  std::shared_ptr<const Resolved> resolved_ KVZC_GUARDED_BY(mutex_);
  // No longer good; visitors may look at them.
  std::vector<std::shared_ptr<const Resolved>> parted_ KVZC_GUARDED_BY(mutex_);
  Status why_ KVZC_GUARDED_BY(mutex_);
  std::int64_t retry_ns_ KVZC_GUARDED_BY(mutex_) = kNever;  // When it has failed.
  std::vector<OperationSlot*> waiting_ KVZC_GUARDED_BY(mutex_);
  std::vector<Orphan> orphans_ KVZC_GUARDED_BY(mutex_);
};

}  // namespace kvzc

// Binding: one grant as this engine can use it. Operations wait here until it is resolved.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/operation_slot.h"
#include "kvzc/handle.h"
#include "kvzc/transport.h"

namespace kvzc {

class Endpoint;
struct PeerTraffic;

class Binding : public std::enable_shared_from_this<Binding> {
 public:
  // Everything that an operation through the grant needs; constant, shared by those that run.
  struct Resolved {
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

  // What a new operation does. Thread: any.
  enum class Next {
    kPost,   // `resolved` is filled in.
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

  const HandleInfo info_;
  mutable std::mutex mutex_;  // Guards the rest.
  State state_ = State::kNew;
  std::shared_ptr<const Resolved> resolved_;
  Status why_;
  std::int64_t retry_ns_ = kNever;  // When it has failed.
  std::vector<OperationSlot*> waiting_;
  std::vector<Orphan> orphans_;
};

}  // namespace kvzc

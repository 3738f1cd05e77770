// Engine: one participant. It owns registrations, transports, threads and the roads to its peers.
//
// Thread: any, for every method of every class here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvzc/catalog.h"
#include "kvzc/faults.h"
#include "kvzc/handle.h"
#include "kvzc/memory.h"
#include "kvzc/stats.h"
#include "kvzc/status.h"
#include "kvzc/transport.h"
#include "kvzc/view.h"

namespace kvzc {

class EngineCore;
class OperationSlot;

struct EngineOptions {
  std::string name;                         // Empty: a random one.
  std::vector<std::string> transports;      // Empty: all that this machine can run.
  double arrival_ttl_seconds = 300;         // Tags that nobody takes are dropped after this.
  bool strict = false;                      // Refuse memory that is not registered.
  std::uint32_t max_transfers = 16384;      // Running at the same time; then put pushes back.
  std::uint32_t max_grants = 131072;        // Alive at the same time.
  std::vector<std::uint32_t> allowed_uids;  // May connect besides this process's own user.
  double connect_timeout_seconds = 10;      // For one attempt to reach a peer.
  // For peers on other hosts. Nothing listens unless it is asked to.
  std::string listen;     // "host:port"; port 0: any. "0.0.0.0:0": on all of the host's networks.
  std::string advertise;  // "host:port" that handles carry instead, where the two differ.
  std::string secret;     // Shared by all engines that may meet; both sides prove it.
  int peer_timeout_seconds = 5;  // A host that is silent for so long is lost; 2 or more.
  TransportTuning tuning;
  RdmaOptions rdma;
  std::string trace;  // A file that says what transfers did when. Empty: $KVZC_TRACE, if that is set.
  std::optional<FaultOptions> faults;          // Trouble on demand, for tests.
  std::shared_ptr<SharedAllocator> allocator;  // Null: the engine makes its own.
};

// Who a peer is, as the kernel and its engine say.
struct PeerInfo {
  Incarnation incarnation{};
  std::string engine_name;
  std::int32_t pid = 0;  // 0 when it is in another pid namespace, or on another host.
  std::uint32_t uid = 0;
  std::string address;  // Empty: it is on this host, reached by its kernel.
};

// A tag that came in.
struct Arrival {
  std::string tag;
  std::shared_ptr<const PeerInfo> peer;
  Code code = Code::kOk;  // Not kOk: the transfer that carried it failed, its bytes are not whole.
  std::int64_t arrived_ns = 0;
};

// One accepted put, get or notify. A value; copies refer to the same transfer.
class Transfer {
 public:
  // How one ended that was over when its call returned: nothing else is left of it.
  struct Ended {
    std::uint64_t number = 0;  // No two of one process have the same.
    std::uint64_t nbytes = 0;
    const char* transport = nullptr;
    std::int64_t submitted_ns = 0;
    std::int64_t done_ns = 0;
    Status status;
  };

  Transfer() = default;
  Transfer(std::shared_ptr<EngineCore> core, OperationSlot* slot);
  explicit Transfer(Ended&& ended) : ended_(std::move(ended)) {}
  Transfer(const Transfer& other) : core_(other.core_), slot_(other.slot_), ended_(other.ended_) {
    if (slot_ != nullptr) retain();
  }
  Transfer(Transfer&& other) noexcept
      : core_(std::move(other.core_)),
        slot_(std::exchange(other.slot_, nullptr)),
        ended_(std::exchange(other.ended_, {})) {}
  Transfer& operator=(Transfer other) noexcept {
    std::swap(core_, other.core_);
    std::swap(slot_, other.slot_);
    std::swap(ended_, other.ended_);
    return *this;
  }
  ~Transfer() {
    if (slot_ != nullptr) release();
  }

  bool is_valid() const { return slot_ != nullptr || ended_.number != 0; }
  bool has_ended() const;
  // Requires: has_ended().
  const Status& status() const;
  std::uint64_t nbytes() const;
  std::uint64_t run_count() const;
  std::string_view transport() const;  // Empty until one is chosen.
  // CLOCK_MONOTONIC. Mostly the same for up to 1 KiB that was over within its call: a look at the
  // clock takes longer than that.
  std::int64_t submitted_ns() const;
  std::int64_t done_ns() const;
  // Helps with the copying, then sleeps until the end. Errors: kTimedOut, and the transfer goes
  // on; kPeerLost when the peer is lost and the transfer is not quiet yet. An end that is a failure
  // is not an error of wait(): look at status().
  Status wait(std::int64_t deadline_ns) const;
  // Lets nothing more of it begin and returns when what had begun is over: as kCancelled, or as
  // it ended before. Errors: kTimedOut, and the transfer is still running.
  Status cancel(std::int64_t deadline_ns) const;
  // Does a share of the copying, if there is any to do, until about the deadline.
  void help(std::int64_t deadline_ns) const;
  // Counts time that a thread has waited for it.
  void count_wait(std::int64_t ns) const;
  // This thread will sleep until the transfer has ended, and not help any more.
  void will_sleep() const;
  // Errors: kForkedEngine in a child made by fork().
  Status usable_here() const;
  // Gives why the peer that it goes to is lost, or ok.
  Status peer_status() const;
  // As TransferState::watch() and unwatch().
  void watch(TransferState::Watch& watch) const;
  void unwatch(TransferState::Watch& watch) const;
  // Whether both are the same transfer.
  bool operator==(const Transfer& other) const {
    return slot_ == other.slot_ && ended_.number == other.ended_.number;
  }
  std::size_t hash() const {
    return slot_ != nullptr ? std::hash<const void*>()(slot_) : std::hash<std::uint64_t>()(ended_.number);
  }

 private:
  void retain() const;
  void release() const;

  std::shared_ptr<EngineCore> core_;
  OperationSlot* slot_ = nullptr;
  Ended ended_;  // Where there is no slot.
};

enum class WaitFor { kAll, kFirst };
// Waits until the first, or all, of several have ended. Errors: kTimedOut.
Status wait_for(std::span<const Transfer> transfers, WaitFor what, std::int64_t deadline_ns);

struct GrantRecord;
struct RegionRecord;

// What a revoke does with a peer that does not answer in time: wait no longer, or cut it off.
enum class Force : bool { kNo, kYes };

// A right that was given out: to put, to get, or both, in one view. A value; copies refer to the
// same grant. It holds until it is revoked or its region is closed, whether or not this is kept.
class Grant {
 public:
  Grant() = default;
  Grant(std::shared_ptr<EngineCore> core, std::shared_ptr<const GrantRecord> record, View view);

  // Gives what the other side needs. Errors: kRevoked, kClosed.
  Result<HandleInfo> handle() const;
  Access access() const;
  const View& view() const { return view_; }
  bool is_revoked() const;
  // Returns once no put or get through it touches the memory; those that run end as kRevoked at
  // their sender. Idempotent. Errors: kTimedOut naming the peer that did not answer: the grant is
  // revoked, its memory is in quarantine until that peer is out of it. With kYes such a peer is cut
  // off; kUnsupported, with the reason, when even that cannot stop what it has begun.
  Status revoke(std::int64_t deadline_ns, Force force) const;

 private:
  std::shared_ptr<EngineCore> core_;
  std::shared_ptr<const GrantRecord> record_;
  View view_;
};

// Local memory registered with an engine. A value; copies refer to the same region.
class Region {
 public:
  Region() = default;
  Region(std::shared_ptr<EngineCore> core, std::shared_ptr<RegionRecord> record);

  // Gives the view of all of it. Errors: kClosed.
  Result<LocalView> view() const;
  // Gives shapes and dtypes, also after close().
  const View& layout() const;
  bool is_open() const;
  // Gives a grant of the whole region, put and get; the same one every time.
  Result<HandleInfo> handle() const;
  // Says in words how a local peer reaches the memory.
  std::string path() const;
  // Revokes all its grants, as Grant::revoke() does; new ones may be made. Errors: as there.
  Status revoke(std::int64_t deadline_ns, Force force);
  // Revokes its grants, waits until no peer touches it through them, lets the memory go.
  // Idempotent. Errors: kTimedOut when a peer did not answer in time: the grants are revoked all
  // the same, and the memory is kept until that peer is out of it.
  Status close(std::int64_t deadline_ns);
  // The same without waiting: the engine sees to it.
  void close_later();

 private:
  std::shared_ptr<EngineCore> core_;
  std::shared_ptr<RegionRecord> record_;
};

// What moves: between a local view and a remote one of equal shape and dtype.
struct TransferItem {
  const LocalView* local;
  const RemoteView* remote;
};

struct TransferOptions {
  std::optional<std::string_view> notify;
  std::uint64_t after = 0;  // What the source waits for on its device; nothing on CPU memory.
  std::int64_t deadline_ns = INT64_MAX;  // Cancels by itself.
  std::string_view label;  // Stands in the trace, where there is one.
};

// So many runs one transfer may have: the list of them takes 24 bytes each, 400 MB.
inline constexpr std::uint64_t kMostRuns = 1u << 24;

// Where somebody who cuts a transfer himself puts its runs.
class RunList {
 public:
  explicit RunList(OperationSlot& slot);
  // What follows lies in this piece of local memory, and in that storage of the handle.
  void begin(const LocalStorage& local, std::uint32_t remote_storage);
  void add(std::byte* local, std::uint64_t remote, std::uint64_t nbytes) {
    runs_.push_back({local, remote, nbytes});
  }
  // Makes room for so many more. Errors: kLimitExceeded beyond kMostRuns.
  Status reserve(std::uint64_t more);

 private:
  OperationSlot& slot_;
  std::vector<Run>& runs_;
};

// Cuts one transfer, between local memory and what one handle names, for Engine::try_run().
class RunCutter {
 public:
  virtual ~RunCutter() = default;
  virtual const std::shared_ptr<const RegionMemory>& local() const = 0;
  virtual const RemoteView& remote() const = 0;
  // Promises that every run lies within its storages and that no byte is written twice. Errors: the
  // transfer's; nothing is posted.
  virtual Status cut(RunList& runs) const = 0;
};

// What an engine has moved to and from one peer, ever.
struct PeerStats {
  PeerInfo peer;
  std::string transport;  // One entry for each that has carried something, or is the first choice.
  bool is_connected = false;
  TrafficStats put, get;
};

class Engine {
 public:
  // Errors: kTransportUnavailable, kInvalidArgument, kLimitExceeded.
  static Result<std::shared_ptr<Engine>> create(EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::string& name() const;
  const Incarnation& incarnation() const;
  // Gives what handles say of where other hosts reach it; empty when it listens at nothing.
  const std::vector<std::string>& addresses() const;
  SharedAllocator& allocator() const;
  const EngineOptions& options() const;
  // Says whether labels are of any use: there is a trace.
  bool is_traced() const;
  // Says whether calls will be served: kClosed, kForkedEngine or ok.
  Status usable() const;

  // Registers one tensor (its name is empty) or a group.
  // Errors: kInvalidArgument for empty, oversized or duplicate ones.
  Result<Region> register_memory(std::span<const TensorSpec> tensors);
  // Gives a view of memory that need not be registered. Errors: kNotRegistered in strict engines.
  Result<LocalView> find_or_borrow(const TensorSpec& tensor);

  // Gives a grant of just that view. Errors: kNotRegistered when it is no part of an open region
  // of this engine; kLimitExceeded. Cost: microseconds.
  Result<Grant> grant(const LocalView& view, Access access);

  // Gives the handles of all regions that are open now, with where they lie. Errors: kLimitExceeded.
  Result<Catalog> catalog();

  // Starts one transfer. Never waits. Errors: kWouldBlock when a queue or the peer's inbox is
  // full, nothing was posted; whatever can be known before the first byte moves.
  Result<Transfer> try_put(std::span<const TransferItem> items, const TransferOptions& options);
  Result<Transfer> try_get(std::span<const TransferItem> items, const TransferOptions& options);
  // The same for a transfer that somebody else has checked and cuts, such as a Plan.
  Result<Transfer> try_run(Direction direction, const RunCutter& cutter,
                           const TransferOptions& options);
  // Sends a tag without data to the owner of a handle, or to a peer. Requires: options.notify.
  Result<Transfer> try_notify(const RemoteView& target, const TransferOptions& options);
  Result<Transfer> try_notify(const PeerInfo& target, const TransferOptions& options);
  // Sleeps until such a call may be accepted, at most until the deadline.
  void wait_for_room(const RemoteView& target, const TransferOptions& options,
                     std::int64_t deadline_ns);
  void wait_for_room(const PeerInfo& target, const TransferOptions& options,
                     std::int64_t deadline_ns);
  // Start one transfer, waiting for room. Errors: as try_put(); kTimedOut.
  Result<Transfer> put(std::span<const TransferItem> items, const TransferOptions& options,
                       std::int64_t deadline_ns);
  Result<Transfer> get(std::span<const TransferItem> items, const TransferOptions& options,
                       std::int64_t deadline_ns);
  // Starts reaching the peer of a handle; the transfer ends when puts would move at once.
  Result<Transfer> connect(const RemoteView& target);
  // Gives who is behind a handle. Errors: kPeerLost when it is not connected.
  Result<std::shared_ptr<const PeerInfo>> peer_of(const RemoteView& target);
  // Says to people which transport carries transfers through a handle, which way the bytes go, and
  // why no better one does. Errors: kPeerLost when it is not connected.
  Result<std::string> explain(const RemoteView& target);
  Status peer_status(const PeerInfo& peer) const;

  // Waits for `count` tags; meanwhile poll_arrivals() leaves `tag` alone. `go_on` is asked some twenty
  // times a second, by this thread, and ends the wait with false: for who has to look at something else
  // too. Errors: kTimedOut, that way too; kPeerLost when `peer` is given and lost; kClosed.
  Result<std::vector<Arrival>> wait_arrivals(std::string_view tag, std::size_t count,
                                             const PeerInfo* peer, std::int64_t deadline_ns,
                                             const std::function<bool()>& go_on = {});
  std::vector<Arrival> poll_arrivals(std::size_t most);
  void forget_arrivals(std::string_view tag);
  // Gives a descriptor that is readable when poll_arrivals() may give something.
  int arrivals_fd();

  EngineStats stats() const;
  // Per peer that was ever connected; of many that are gone only the sums are left, under an empty
  // name.
  std::vector<PeerStats> peer_stats() const;
  // Ends everything: transfers, grants, peers, threads. Idempotent. Errors: kTimedOut when a
  // transfer or a peer did not come to rest in time; everything is closed all the same. A call with
  // an earlier deadline hurries one that waits on another thread.
  Status close(std::int64_t deadline_ns);

 private:
  explicit Engine(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}
  std::shared_ptr<EngineCore> core_;
};

}  // namespace kvzc

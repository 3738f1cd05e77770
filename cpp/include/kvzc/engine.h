// Engine: one participant. It owns registrations, transports, threads and the roads to its peers.
//
// Thread: any, for every method of every class here.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvzc/handle.h"
#include "kvzc/memory.h"
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
  TransportTuning tuning;
  std::shared_ptr<SharedAllocator> allocator;  // Null: the engine makes its own.
};

// Who a peer is, as the kernel and its engine say.
struct PeerInfo {
  Incarnation incarnation{};
  std::string engine_name;
  std::int32_t pid = 0;  // 0 when it is in another pid namespace.
  std::uint32_t uid = 0;
};

// A tag that came in.
struct Arrival {
  std::string tag;
  std::shared_ptr<const PeerInfo> peer;
  Code code = Code::kOk;  // Not kOk: the transfer that carried it failed, its bytes are not whole.
  std::int64_t arrived_ns = 0;
};

// One accepted put or get. A value; copies refer to the same transfer.
class Transfer {
 public:
  Transfer() = default;
  Transfer(std::shared_ptr<EngineCore> core, OperationSlot* slot);
  Transfer(const Transfer& other);
  Transfer(Transfer&& other) noexcept;
  Transfer& operator=(Transfer other) noexcept;
  ~Transfer();

  bool has_ended() const;
  // Requires: has_ended().
  Status status() const;
  std::uint64_t nbytes() const;
  std::uint64_t run_count() const;
  std::string_view transport() const;  // Empty until one is chosen.
  std::int64_t submitted_ns() const;
  std::int64_t done_ns() const;
  // Helps with the copying, then sleeps until the end. Errors: kTimedOut, and the transfer goes
  // on. An end that is a failure is not an error of wait(): look at status().
  Status wait(std::int64_t deadline_ns) const;
  // Lets nothing more of it begin and returns when what had begun is over: as kCancelled, or as
  // it ended before. Errors: kTimedOut, and the transfer is still running.
  Status cancel(std::int64_t deadline_ns) const;
  // Does a share of the copying, if there is any to do, until about the deadline.
  void help(std::int64_t deadline_ns) const;
  // Errors: kForkedEngine in a child made by fork().
  Status usable_here() const;
  TransferState& state() const;

 private:
  std::shared_ptr<EngineCore> core_;
  OperationSlot* slot_ = nullptr;
};

enum class WaitFor { kAll, kFirst };
// Waits until the first, or all, of several have ended. Errors: kTimedOut.
Status wait_for(std::span<const Transfer> transfers, WaitFor what, std::int64_t deadline_ns);

struct RegionRecord;

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
  // Revokes its grants, waits until no peer writes through them, lets the memory go. Idempotent.
  // Errors: kTimedOut when a peer did not answer in time; the grants are revoked all the same.
  Status close(std::int64_t deadline_ns);
  // The same without waiting: the engine sees to it.
  void close_later();

 private:
  std::shared_ptr<EngineCore> core_;
  std::shared_ptr<RegionRecord> record_;
};

struct PutItem {
  const LocalView* source;
  const RemoteView* target;
};

struct PutOptions {
  std::optional<std::string_view> notify;
  std::uint64_t after = 0;  // What the source waits for on its device; nothing on CPU memory.
};

struct EngineStats {
  std::uint64_t regions = 0, storages = 0, grants = 0, peers = 0;
  std::uint64_t transfers_running = 0, transfers_done = 0, transfers_failed = 0,
                transfers_cancelled = 0;
  std::uint64_t bytes_done = 0, runs_done = 0, temporary_registrations = 0;
  std::uint64_t arrivals_pending = 0, arrivals_arrived = 0, arrivals_taken = 0,
                arrivals_expired = 0, arrivals_forgotten = 0;
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
  SharedAllocator& allocator() const;
  const EngineOptions& options() const;
  // Says whether calls will be served: kClosed, kForkedEngine or ok.
  Status usable() const;

  // Registers one tensor (its name is empty) or a group.
  // Errors: kInvalidArgument for empty, oversized or duplicate ones.
  Result<Region> register_memory(std::span<const TensorSpec> tensors);
  // Gives a view of memory that need not be registered. Errors: kNotRegistered in strict engines.
  Result<LocalView> find_or_borrow(const TensorSpec& tensor);

  // Starts one transfer. Never waits. Errors: kWouldBlock when a queue or the peer's inbox is
  // full, nothing was posted; whatever can be known before the first byte moves.
  Result<Transfer> try_put(std::span<const PutItem> items, const PutOptions& options);
  // Sleeps until such a call may be accepted, at most until the deadline.
  void wait_for_room(const RemoteView& target, const PutOptions& options, std::int64_t deadline_ns);
  // Starts one transfer, waiting for room. Errors: as try_put(); kTimedOut.
  Result<Transfer> put(std::span<const PutItem> items, const PutOptions& options,
                       std::int64_t deadline_ns);
  // Starts reaching the peer of a handle; the transfer ends when puts would move at once.
  Result<Transfer> connect(const RemoteView& target);
  // Gives who is behind a handle. Errors: kPeerLost when it is not connected.
  Result<std::shared_ptr<const PeerInfo>> peer_of(const RemoteView& target);
  Status peer_status(const PeerInfo& peer) const;

  // Waits for `count` tags. Errors: kTimedOut; kPeerLost when `peer` is given and lost; kClosed.
  Result<std::vector<Arrival>> wait_arrivals(std::string_view tag, std::size_t count,
                                             const PeerInfo* peer, std::int64_t deadline_ns);
  // As long as the token lives, poll_arrivals() leaves `tag` alone; for those who wait in slices.
  std::shared_ptr<void> expect_arrivals(std::string_view tag);
  std::vector<Arrival> poll_arrivals(std::size_t most);
  void forget_arrivals(std::string_view tag);
  // Gives a descriptor that is readable when poll_arrivals() may give something.
  int arrivals_fd();

  EngineStats stats() const;
  // In a child made by fork(): closes the sockets that came along, so that the parent's peers see
  // the parent's end. Takes no lock.
  void after_fork_in_child();
  // Ends everything: transfers, grants, peers, threads. Idempotent. Errors: kTimedOut when a
  // transfer or a peer did not come to rest in time; everything is closed all the same.
  Status close(std::int64_t deadline_ns);

 private:
  explicit Engine(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}
  std::shared_ptr<EngineCore> core_;
};

}  // namespace kvzc

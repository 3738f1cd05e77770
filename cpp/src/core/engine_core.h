// EngineCore: what an Engine is made of. The public classes hold it together by shared ownership.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/doorbell.h"
#include "base/fence_board.h"
#include "base/mutex.h"
#include "base/patience.h"
#include "base/shared_memory.h"
#include "base/socket_list.h"
#include "core/binding.h"
#include "core/control_loop.h"
#include "core/control_socket.h"
#include "core/deadlines.h"
#include "core/endpoint.h"
#include "core/grant_table.h"
#include "core/inbox.h"
#include "core/operation_slot.h"
#include "core/storage_table.h"
#include "core/trace.h"
#include "core/traffic.h"
#include "kvzc/engine.h"

namespace kvzc {

class EngineCore;

// A registered tensor or group. Constant but for what its mutex guards.
struct RegionRecord {
  struct LiveGrant {
    std::shared_ptr<const GrantRecord> record;
    std::shared_ptr<const RegionMemory> memory;
  };
  // One that a peer may still be within.
  struct Revoked {
    FenceTicket fence;
    std::uint64_t nbytes = 0;
  };

  std::uint64_t id = 0;
  const EngineCore* engine = nullptr;
  View layout;

  Mutex mutex;  // Guards the rest.
  std::shared_ptr<const RegionMemory> memory KVZC_GUARDED_BY(mutex);  // Null once closed.
  std::unordered_map<std::uint64_t, LiveGrant> grants KVZC_GUARDED_BY(mutex);
  std::shared_ptr<const GrantRecord> whole KVZC_GUARDED_BY(mutex);  // What handle() gives out.
  std::vector<Revoked> unfenced KVZC_GUARDED_BY(mutex);
  // Closed, but not let go before `unfenced` is empty.
  std::shared_ptr<const RegionMemory> leaving KVZC_GUARDED_BY(mutex);
};

class EngineCore final : public std::enable_shared_from_this<EngineCore>,
                         public OperationSink,
                         public PeerSink,
                         public EndpointHost {
 public:
  explicit EngineCore(EngineOptions options);
  ~EngineCore() override;

  Status start();
  Status close(std::int64_t deadline_ns);
  Status usable() const;
  bool is_usable() const {
    // Sequentially consistent for begin() and try_now() alone.
    return !fork_guard_.is_forked_child() && !is_closed_.load(std::memory_order_seq_cst);
  }
  bool is_forked_child() const { return fork_guard_.is_forked_child(); }
  // As usable(), but a closed engine is still usable here.
  Status usable_here() const {
    return fork_guard_.is_forked_child() ? forked() : Status::ok();
  }

  // --- Memory ---
  Result<Region> register_memory(std::span<const TensorSpec> tensors);
  Result<LocalView> find_or_borrow(const TensorSpec& tensor);
  Result<std::shared_ptr<const GrantRecord>> whole_grant(RegionRecord& record);
  Result<Grant> grant(const LocalView& view, Access access);
  // Gives what a grant of `view` says to the other side.
  Result<HandleInfo> describe(const GrantRecord& grant, const View& view) const;
  bool is_revoked(const GrantRecord& grant) const;
  Result<Catalog> catalog();
  Result<std::string> explain(const RemoteView& target);
  Status revoke_grant(const std::shared_ptr<const GrantRecord>& grant, std::int64_t deadline_ns,
                      Force force);
  Status revoke_region(const std::shared_ptr<RegionRecord>& record, std::int64_t deadline_ns,
                       Force force);
  Status close_region(std::shared_ptr<RegionRecord> record, std::int64_t deadline_ns);
  void close_region_later(std::shared_ptr<RegionRecord> record);

  // --- Transfers ---
  // Whether a transfer without bytes may end before its peer is reached.
  enum class Purpose { kPut, kConnect };
  Result<Transfer> try_submit(Direction direction, std::span<const TransferItem> items,
                              const TransferOptions& options, Purpose purpose = Purpose::kPut);
  Result<Transfer> try_run(Direction direction, const RunCutter& cutter,
                           const TransferOptions& options);
  Result<Transfer> connect(const RemoteView& target);
  Result<Transfer> try_notify(const RemoteView& target, const TransferOptions& options);
  Result<Transfer> try_notify(const PeerInfo& target, const TransferOptions& options);
  void wait_for_room(const RemoteView& target, const TransferOptions& options,
                     std::int64_t deadline_ns);
  void wait_for_room(const PeerInfo& target, const TransferOptions& options,
                     std::int64_t deadline_ns);
  Status cancel(OperationSlot& slot, std::int64_t deadline_ns);
  // Lives as long as the view's handle.
  Binding& binding_for(const RemoteView& view);

  // --- Arrivals and peers ---
  Result<std::vector<Arrival>> wait_arrivals(std::string_view tag, std::size_t count,
                                             const PeerInfo* peer, std::int64_t deadline_ns,
                                             const std::function<bool()>& go_on);
  std::vector<Arrival> poll_arrivals(std::size_t most);
  void forget_arrivals(std::string_view tag);
  int arrivals_fd();
  Status peer_status(const PeerInfo& peer);

  bool is_traced() const { return trace_ != nullptr; }
  EngineStats stats();
  std::vector<PeerStats> peer_stats() const;

  // --- OperationSink, PeerSink ---
  void retire(Operation& operation, Status status) override;
  void retain(Operation& operation) override { operation.retain(); }
  void release(Operation& operation) override;
  void waited(std::int64_t ns) override {
    counters_.wait_ns.fetch_add(ns, std::memory_order_relaxed);
  }
  void arrived(std::uint64_t peer_token, std::string_view tag, Code code) override;
  void channel_lost(std::uint64_t peer_token) override;

  // --- EndpointHost ---
  const Incarnation& incarnation() const override { return incarnation_; }
  const std::string& engine_name() const override { return options_.name; }
  // Where other hosts reach it. Constant once started.
  const std::vector<std::string>& addresses() const { return addresses_; }
  GrantTable& grants() override { return grants_; }
  ControlLoop& loop() override { return loop_; }
  std::span<const std::unique_ptr<Transport>> transports() override { return transports_; }
  bool is_allowed(std::uint32_t uid) const override;
  void endpoint_returned(Endpoint& endpoint) override;
  void endpoint_ready(Endpoint& endpoint) override;
  void endpoint_lost(Endpoint& endpoint, std::span<const std::shared_ptr<Binding>> bindings,
                     PeerFate fate) override;
  void endpoint_gone(Endpoint& endpoint) override;
  void start_binding(std::shared_ptr<Binding> binding) override;
  void binding_answered(Endpoint& endpoint, const std::shared_ptr<Binding>& binding, Status status,
                        std::shared_ptr<const Binding::Resolved> resolved) override;

  const EngineOptions& options() const override { return options_; }
  SocketList& sockets() override { return sockets_; }

 private:
  static Status forked();

  using Endpoints = std::vector<std::shared_ptr<Endpoint>>;

  // --- Revoking. Any thread. ---

  enum class Fate { kKept, kClosed };  // Of the region whose grants are revoked.
  // Moves the epochs of the region's grants on, of all or of one.
  void shut(RegionRecord& region, const GrantRecord* only, Fate fate);
  // Waits for those within one revoked grant, or within all that the region has, and lets go of
  // what is safe. What is not goes into quarantine.
  Status settle(const std::shared_ptr<RegionRecord>& region, std::optional<FenceTicket> only,
                std::int64_t deadline_ns, Force force);
  Status fence_everywhere(std::span<const FenceTicket> grants, std::int64_t deadline_ns,
                          Force force);
  // Ready peers, and lost ones that may still be writing.
  Endpoints everyone() const;
  // Takes fenced grants off the region's list, and lets its memory go when it is closed and the
  // list is empty.
  void forget_fenced(RegionRecord& region, std::span<const FenceTicket> grants);
  void let_go(const RegionMemory& memory);
  void watch_quarantine(std::int64_t pause_ns);
  // Gives whether anything is left in it.
  bool look_at_quarantine();

  struct LostPeer {
    Status why;
    bool has_ended = false;  // Its process has exited or its engine has closed.
    // From then on it may be tried again: networks come back.
    std::int64_t retry_ns = INT64_MAX;

    bool is_final() const { return retry_ns == INT64_MAX; }
  };

  // --- Transfers. Any thread. ---

  // Says why nothing goes through a handle any more: `why`, or that its engine has ended and another
  // one has taken its place.
  Status after_loss(const HandleInfo& handle, Status why) const;

  // Does one that is small and goes to a peer that is reached, on this thread and without a slot.
  // Nothing: it takes the long way. Requires: `run` is all of the item.
  std::optional<Transfer::Ended> try_now(Direction direction, const TransferItem& item,
                                         const Run& run, const TransferOptions& options,
                                         const Binding::Resolved& resolved);
  Result<Transfer> submit_nothing(const RemoteView& target, const TransferOptions& options,
                                  Purpose purpose);
  // Errors: kUnsupported, kAccessDenied: the handle does not let bytes move this way.
  static Status may_move(Direction direction, const HandleInfo& handle);
  // Gives the way that stands, or null.
  static const Binding::Resolved* way_of(const Binding::Visit& visit);
  // Starts a transfer whose runs `fill(slot)` cuts, by the way that stands or when there is one.
  template <typename Fill>
  Result<Transfer> submit(Direction direction, Binding& binding, const Binding::Resolved* way,
                          const TransferOptions& options, Purpose purpose, const Fill& fill_slot);
  // Takes a slot and fills in what all transfers have, but the deadline. Errors: kWouldBlock.
  inline Result<OperationSlot*> begin(Direction direction, const TransferOptions& options);
  // From here on other threads may fail it.
  inline void set_deadline(OperationSlot& slot, std::int64_t deadline_ns);
  // Fails it and lets nothing more of it begin.
  void stop(OperationSlot& slot, const Status& why);
  // Wakes those who sleep while as many run as may. Requires: one less runs.
  void wake_for_room();
  // Sleeps while as many run as may; gives whether it did.
  bool wait_for_slot(std::int64_t left_ns);
  std::shared_ptr<Endpoint> endpoint_of(const PeerInfo& peer) const;
  void expire_deadlines();
  void watch_deadlines();

  // Binds the port that options name and says where others reach it.
  Status listen_to_hosts();

  // Control thread.
  void watch_listener(OwnedFd& listener, ControlSocket::Kind kind);
  void on_connection(OwnedFd& listener, ControlSocket::Kind kind);
  void check_handshakes();
  void tick();
  // Something that waits for a credit: a transfer that was accepted before its peer was reached,
  // or, without a slot, the tag of one that has ended.
  struct CreditWaiter {
    OperationSlot* slot = nullptr;
    Binding::Orphan orphan;
    std::shared_ptr<const Binding::Resolved> resolved;  // Null without a slot.
    std::shared_ptr<Endpoint> endpoint;
    Channel* channel = nullptr;  // Of the endpoint.
  };
  // Posts, retires or sends; gives false when it must go on waiting.
  bool try_again(CreditWaiter& waiter);
  void look_for_credits();
  // Gives whether a thread is within a transfer of its own.
  bool end_waiting(const Status& why);

  // Any thread.
  Status fill(OperationSlot& slot, std::span<const TransferItem> items);
  static inline Status fill(OperationSlot& slot, const TransferItem& item, const Run& run);
  Status fill(OperationSlot& slot, const RunCutter& cutter);
  static Status check_targets_disjoint(const OperationSlot& slot);
  static bool do_runs_meet(const OperationSlot& slot);
  void count_failure(const Status& status);
  // Gives where what moves to and from a peer is counted.
  std::shared_ptr<PeerTraffic> traffic_of(const PeerInfo& peer, const char* transport);
  void trace(const OperationSlot& slot, const Status& status, std::int64_t done_ns);
  // Posts, or gives kWouldBlock when the tag has no credit, or another reason why not.
  inline Status dispatch(OperationSlot& slot, const Binding::Resolved& resolved);
  inline Status prepare(OperationSlot& slot, const Binding::Resolved& resolved);
  void abandon(OperationSlot* slot);
  class WaitCount;
  class Expectation;
  void drain_all();
  std::shared_ptr<const Endpoints> drained() const;
  void set_drained(std::shared_ptr<const Endpoints> endpoints) KVZC_REQUIRES(mutex_);

  EngineOptions options_;
  Incarnation incarnation_{};
  std::string address_;                // On this host,
  std::vector<std::string> addresses_;  // and from others.
  ForkGuard fork_guard_;
  std::atomic<bool> is_closed_{false};

  Doorbell doorbell_;
  FenceBoard fences_;
  TransportHost transport_host_;
  std::vector<std::unique_ptr<Transport>> transports_;
  GrantTable grants_;
  StorageTable storages_;
  OperationPool operations_;
  Deadlines deadlines_;
  // When the timer for the next deadline fires; INT64_MAX: none runs.
  std::atomic<std::int64_t> deadline_timer_ns_{INT64_MAX};
  Inbox inbox_;
  Patience arrival_patience_;  // How long a thread looks for arrivals before it sleeps.
  ControlLoop loop_;

  SocketList sockets_;

  // Control thread.
  OwnedFd listener_;
  OwnedFd host_listener_;
  std::vector<std::shared_ptr<Endpoint>> endpoints_;
  std::int64_t handshake_check_ns_ = 0;
  std::deque<CreditWaiter> credit_waiters_;
  std::int64_t credit_pause_ns_ = 0;  // 0: nobody waits.
  bool credit_timer_ = false;

  // Shared by all threads.
  Mutex close_mutex_;    // One close at a time.
  std::atomic<std::int64_t> close_by_ns_{INT64_MAX};  // The earliest that any of them was given.
  std::atomic<bool> has_arrivals_fd_{false};
  std::atomic<std::uint64_t> drained_version_{0};  // Moves on after drained_ has changed.
  mutable Mutex mutex_;  // Guards the next eight.
  std::unordered_map<std::uint64_t, std::shared_ptr<RegionRecord>> regions_ KVZC_GUARDED_BY(mutex_);
  std::uint64_t next_region_ KVZC_GUARDED_BY(mutex_) = 1;
  std::multimap<std::pair<Incarnation, std::uint64_t>, std::weak_ptr<Binding>> bindings_
      KVZC_GUARDED_BY(mutex_);
  // Expired ones are swept when there are that many.
  std::size_t bindings_sweep_ KVZC_GUARDED_BY(mutex_) = 64;
  std::shared_ptr<const Endpoints> drained_ KVZC_GUARDED_BY(mutex_) = std::make_shared<const Endpoints>();
  // Lost, but perhaps still writing: closing a region waits for them too.
  Endpoints doubtful_ KVZC_GUARDED_BY(mutex_);
  std::map<Incarnation, LostPeer> lost_peers_ KVZC_GUARDED_BY(mutex_);
  // By peer and transport; under no incarnation: all other peers.
  std::map<std::pair<Incarnation, std::string>, std::shared_ptr<PeerTraffic>> traffic_
      KVZC_GUARDED_BY(mutex_);

  // Regions of which a peer that did not answer may still touch the memory.
  mutable Mutex quarantine_mutex_;  // Guards the next two.
  std::vector<std::shared_ptr<RegionRecord>> quarantine_ KVZC_GUARDED_BY(quarantine_mutex_);
  bool is_quarantine_watched_ KVZC_GUARDED_BY(quarantine_mutex_) = false;

  struct Counters {
    std::atomic<std::uint64_t> running{0}, failed{0}, cancelled{0}, temporary{0};
    std::atomic<std::uint64_t> done{0};  // Without a peer.
    std::atomic<std::int64_t> wait_ns{0}, accept_wait_ns{0}, arrival_wait_ns{0};
    std::atomic<std::uint32_t> room_count{0}, room_sleepers{0};
  };
  Counters counters_;
  std::array<std::atomic<std::uint64_t>, kCodeCount> failed_by_code_{};
  std::unique_ptr<Trace> trace_;  // Null: none.
};

}  // namespace kvzc

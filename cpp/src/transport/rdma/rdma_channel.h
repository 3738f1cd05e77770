// RdmaChannel: operations to one peer by one-sided verbs, over one or more rails.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/patience.h"
#include "base/short_mutex.h"
#include "kvzc/transport.h"
#include "transport/rdma/poller.h"
#include "transport/rdma/queue_pair.h"
#include "transport/rdma/remote_memory.h"

namespace kvzc::rdma {

// How far an operation is: what is forgotten for the next one.
struct Standing {
  Operation* operation = nullptr;
  // The next byte that was not posted yet.
  std::uint32_t segment = 0;
  std::uint32_t run = 0;
  std::uint64_t skip = 0;

  std::uint32_t outstanding = 0;  // Requests that were posted or wait to be posted again.
  int rail = -1;                  // The one that carries all of it; -1: any may.
  std::uint64_t rails_used = 0;   // Bits: those whose writes must be flushed.
  bool is_parted = false;         // Some of its memory has more than one key on a device.
  bool is_all_posted = false;     // Or given up.
  bool is_tag_posted = false;
  std::int64_t slept_since_ns = 0;  // A thread sleeps until it ends, and began to wait then.
  std::uint32_t running_at = 0;     // Its place in the list of those that run.
  std::uint64_t tag_sequence = 0;  // Of a tag that was posted and came back: it may have arrived.
};

// The same with room for its keys, which is used again.
struct Progress : Standing {
  std::vector<Registration*> local;  // Of segment s on rail r: s * rails + r.

  // Makes it that of another operation, and gives back the room for the next one's keys.
  void begin(Operation& next, std::vector<Registration*>& keys) {
    static_cast<Standing&>(*this) = {};
    operation = &next;
    local.swap(keys);
  }
};

class RdmaChannel final : public Channel, private CompletionTarget {
 public:
  RdmaChannel(TransportHost& host, Poller& poller, std::vector<std::unique_ptr<QueuePair>> pairs,
              std::uint32_t arrival_depth, const ChannelPeer& peer);
  ~RdmaChannel() override;
  // Connects what can be connected. Called once, before anything else. Errors: kTransportUnavailable
  // when no rail reaches the peer.
  Status connect(std::span<const QueuePairAddress> peer, bool is_same_host);

  void post(Operation& operation) override;
  void help(Operation& operation, std::int64_t deadline_ns) override;
  void will_sleep(Operation& operation) override;
  void abort(Operation& operation) override;
  Status take_credit(std::size_t tag_bytes) override;
  void return_credit(std::size_t tag_bytes) override;
  void wait_for_credit(std::size_t tag_bytes, std::int64_t timeout_ns) override;
  void send_tag(const Tag& tag, Code code) override;
  Status look_at_grant(FenceTicket grant) override;
  void drain() override;
  void look() override { (void)poller_.help(); }
  void begin_rest() override { poller_.begin_rest(); }
  void end_rest() override { poller_.end_rest(); }
  void grant_credits(std::uint32_t count) override;
  Status fence(std::span<const FenceTicket> grants, std::int64_t deadline_ns) override;
  Status cut_off(std::int64_t deadline_ns) override;
  void lose(Status why, PeerFate fate) override;
  Status lost() const override;
  bool is_quiet() const override;
  std::string explain(const RemoteMemory& memory) const override;

  // The device of this rail says that it is down: its work goes to the others. The only one is kept
  // as long as it may come back.
  void rail_is_down(std::size_t rail, const char* why, bool is_fatal, Endings& endings);
  // The poller calls this once in kWatchNs: a rail on which nothing has come back for too long is
  // taken out, also where its device has not noticed.
  static constexpr std::int64_t kWatchNs = 1'000'000'000;
  void watch(Endings& endings);

 private:
  // Asked of the peer, by the slot of the grant.
  struct AskedFence {
    std::uint64_t epoch = 0;
    std::uint64_t number = 0;
    bool is_done = false;
  };
  // Asked by the peer, and not answered yet.
  struct FenceToAnswer {
    std::uint64_t number = 0;
    std::vector<FenceTicket> grants;
  };

  void on_completions(std::size_t rail, std::span<const ibv_wc> completions,
                      Endings& endings) override;

  // Posts, and gives whether it is time to look what has come back. Requires: no lock.
  inline bool begin(Operation& operation);
  void stand_back();
  // Hands arrivals to the engine. Requires: no lock but the rail's.
  void hand_on(const std::vector<Message>& arrivals);
  void tell_loss();
  // Sleeps until something of what waiters look at has changed, at most so long.
  void sleep_for_change(UniqueLock<ShortMutex>& lock, std::int64_t timeout_ns)
      KVZC_REQUIRES(shared_.mutex);
  // After break_rail(), where no completion may follow. Requires: no lock.
  void settle_break(Endings& endings);

  // All below collect what has ended.
  void tell_change() KVZC_REQUIRES(shared_.mutex) {
    if (shared_.watchers > 0) shared_.changed.notify_all();
  }
  void pump(Endings& endings) KVZC_REQUIRES(shared_.mutex);
  void pump_data(Endings& endings) KVZC_REQUIRES(shared_.mutex);
  void pump_messages() KVZC_REQUIRES(shared_.mutex);
  inline bool ring() KVZC_REQUIRES(shared_.mutex);
  inline QueuePair* rail_for(Progress& progress) KVZC_REQUIRES(shared_.mutex);
  Piece cut_piece(const Progress& progress) const KVZC_REQUIRES(shared_.mutex);
  void advance(Progress& progress, std::uint64_t nbytes) const KVZC_REQUIRES(shared_.mutex);
  void add_piece(QueuePair& pair, const Piece& piece) KVZC_REQUIRES(shared_.mutex);
  inline void add_flushes(Progress& progress) KVZC_REQUIRES(shared_.mutex);
  // Posts a turn's worth of it, or what there is room for. Gives whether that ended its turn.
  bool take_turn(Progress& progress) KVZC_REQUIRES(shared_.mutex);
  // Posts all of it, if it is one run that one request takes, and there is room. Gives whether it did.
  inline bool post_whole(Progress& progress) KVZC_REQUIRES(shared_.mutex);
  inline void finish_posting(Progress& progress) KVZC_REQUIRES(shared_.mutex);
  void watch_for_sleeper(Progress& progress) KVZC_REQUIRES(shared_.mutex);
  void give_up_rest(Progress& progress, Endings& endings) KVZC_REQUIRES(shared_.mutex);
  inline void take_completion(QueuePair& pair, const ibv_wc& completion, Endings& endings)
      KVZC_REQUIRES(shared_.mutex);
  inline void came_back(QueuePair& pair, const Posted& entry, bool is_ok, Endings& endings)
      KVZC_REQUIRES(shared_.mutex);
  void finish_if_over(Progress& progress, Endings& endings) KVZC_REQUIRES(shared_.mutex);
  QueuePair* pair_for_message(MessageType type) KVZC_REQUIRES(shared_.mutex);
  void queue_message(MessageType type, Code code, std::span<const std::byte> body,
                     std::size_t rail, std::uint64_t sequence = 0) KVZC_REQUIRES(shared_.mutex);
  void send_message(QueuePair& pair, Message& message, Progress* progress)
      KVZC_REQUIRES(shared_.mutex);
  void take_message(const Message& message, Endings& endings) KVZC_REQUIRES(shared_.mutex);
  void take_fence_ask(const Message& message, Endings& endings) KVZC_REQUIRES(shared_.mutex);
  void answer_fences() KVZC_REQUIRES(shared_.mutex);
  inline bool must_tell_taken() const KVZC_REQUIRES(shared_.mutex);
  // Says whether pump() would find anything to do.
  inline bool must_pump() const KVZC_REQUIRES(shared_.mutex);
  inline bool is_revoked(FenceTicket grant) const KVZC_REQUIRES(shared_.mutex);
  bool has_live_rail() const KVZC_REQUIRES(shared_.mutex);
  bool are_all_drained() const KVZC_REQUIRES(shared_.mutex);
  void break_rail(QueuePair& pair, const std::string& why) KVZC_REQUIRES(shared_.mutex);
  void look_at_broken_rails(Endings& endings) KVZC_REQUIRES(shared_.mutex);
  void release_orphans(std::size_t rail, Endings& endings) KVZC_REQUIRES(shared_.mutex);
  void lose_locked(Status why, Endings& endings) KVZC_REQUIRES(shared_.mutex);

  // Needs no lock.
  inline Status find_keys(const Operation& operation, std::vector<Registration*>& out,
                          bool* is_parted) const;

  TransportHost& host_;
  Poller& poller_;
  const std::uint32_t peer_depth_;
  const ChannelPeer peer_;
  const std::size_t rail_count_;
  const std::uint32_t most_still_;  // Looks of watch() without a completion.
  std::size_t most_sges_ = SIZE_MAX;

  // What the threads of this process share.
  struct Shared {
    mutable ShortMutex mutex;
    std::atomic<std::uint32_t> ahead{0};  // Threads that want the mutex before those who post.
    std::condition_variable_any changed;  // Credits came, a fence was answered, the channel is lost.
    std::atomic<bool> is_lost{false};
    Status lost_why KVZC_GUARDED_BY(mutex);
    std::uint32_t watchers KVZC_GUARDED_BY(mutex) = 0;  // Threads that sleep until that.
    bool must_tell_loss KVZC_GUARDED_BY(mutex) = false;

    // By rail. Those that never connected are broken.
    std::vector<std::unique_ptr<QueuePair>> pairs KVZC_GUARDED_BY(mutex);
    // Nothing that the peer had on that rail is under way; it was asked to close its side; it was told
    // that ours is empty.
    std::vector<bool> is_closed_there KVZC_GUARDED_BY(mutex);
    std::vector<bool> has_said_close KVZC_GUARDED_BY(mutex);
    std::vector<bool> has_said_closed KVZC_GUARDED_BY(mutex);
    // Why it was never connected, or broke; what came back unfinished when it broke.
    std::vector<std::string> why_out KVZC_GUARDED_BY(mutex);
    std::vector<std::vector<Piece>> orphans KVZC_GUARDED_BY(mutex);
    std::string last_break KVZC_GUARDED_BY(mutex);  // Why the rail that broke last did.

    std::vector<std::unique_ptr<Progress>> progresses KVZC_GUARDED_BY(mutex);
    std::vector<Progress*> free_progresses KVZC_GUARDED_BY(mutex);
    std::uint64_t posts KVZC_GUARDED_BY(mutex) = 0;  // Operations that were posted, ever.
    // Every operation that has not ended; of those the ones with bytes that were not posted, and the
    // ones that are over but for flushes that there was no room for.
    std::vector<Progress*> running KVZC_GUARDED_BY(mutex);
    std::deque<Progress*> to_post KVZC_GUARDED_BY(mutex);
    std::vector<Progress*> to_flush KVZC_GUARDED_BY(mutex);
    std::deque<Piece> again KVZC_GUARDED_BY(mutex);  // Pieces of a rail that broke.

    std::deque<Message> outgoing KVZC_GUARDED_BY(mutex);
    std::uint64_t next_sequence KVZC_GUARDED_BY(mutex) = 1;
    // All messages up to this one were taken, and these.
    std::uint64_t seen_until KVZC_GUARDED_BY(mutex) = 0;
    std::set<std::uint64_t> seen_more KVZC_GUARDED_BY(mutex);

    // Credits that were given for tags of ours, ever; those of them that left the peer's inbox.
    std::uint64_t reserved_tags KVZC_GUARDED_BY(mutex) = 0;
    std::uint64_t peer_taken KVZC_GUARDED_BY(mutex) = 0;
    bool has_asked_for_credit KVZC_GUARDED_BY(mutex) = false;
    std::uint64_t received_tags KVZC_GUARDED_BY(mutex) = 0;
    std::uint64_t taken_tags KVZC_GUARDED_BY(mutex) = 0;
    std::uint64_t told_taken KVZC_GUARDED_BY(mutex) = 0;
    bool is_asked_for_credit KVZC_GUARDED_BY(mutex) = false;

    std::unordered_map<std::uint32_t, AskedFence> asked KVZC_GUARDED_BY(mutex);
    std::uint64_t next_fence KVZC_GUARDED_BY(mutex) = 1;
    // By slot: the last epoch that ended.
    std::unordered_map<std::uint32_t, std::uint64_t> revoked KVZC_GUARDED_BY(mutex);
    std::vector<FenceToAnswer> to_answer KVZC_GUARDED_BY(mutex);

    // Taken, and not handed on yet: with no lock but the rail's.
    std::vector<Message> arrivals KVZC_GUARDED_BY(mutex);
    std::atomic<bool> is_open{false};  // The engine takes arrivals: it has drained once.
  };
  // Holds the lock, and has those who post and post stand back for it.
  class KVZC_THREAD_SAFETY(scoped_lockable) LockAhead {
   public:
    explicit LockAhead(Shared& shared) KVZC_THREAD_SAFETY(acquire_capability(shared.mutex));
    ~LockAhead() KVZC_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }
    LockAhead(const LockAhead&) = delete;
    LockAhead& operator=(const LockAhead&) = delete;

   private:
    ShortMutex& mutex_;
  };
  Shared shared_;
  Patience patience_;  // How long a waiter looks at the queues itself.
};

}  // namespace kvzc::rdma

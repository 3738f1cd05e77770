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
#include "kvzc/transport.h"
#include "transport/rdma/poller.h"
#include "transport/rdma/queue_pair.h"
#include "transport/rdma/remote_memory.h"

namespace kvzc::rdma {

// How far an operation is.
struct Progress {
  Operation* operation = nullptr;
  // The next byte that was not posted yet.
  std::uint32_t segment = 0;
  std::uint32_t run = 0;
  std::uint64_t skip = 0;

  std::uint32_t outstanding = 0;  // Requests that were posted or wait to be posted again.
  int rail = -1;                  // The one that carries all of it; -1: any may.
  std::uint64_t rails_used = 0;   // Bits: those whose writes must be flushed.
  bool is_all_posted = false;     // Or given up.
  bool is_tag_posted = false;
  std::int64_t slept_since_ns = 0;  // A thread sleeps until it ends, and began to wait then.
  std::uint32_t running_at = 0;     // Its place in the list of those that run.
  std::uint64_t tag_sequence = 0;  // Of a tag that was posted and came back: it may have arrived.
  std::vector<Registration*> local;  // Of segment s on rail r: s * rails + r.

  // Makes it that of another operation, and keeps the room of its list.
  void begin(Operation& next, std::span<Registration* const> keys) {
    std::vector<Registration*> room = std::move(local);
    *this = Progress();
    local = std::move(room);
    local.assign(keys.begin(), keys.end());
    operation = &next;
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
  bool begin(Operation& operation);
  void let_completions_in();
  // Hands arrivals to the engine. Requires: no lock but the rail's.
  void hand_on(const std::vector<Message>& arrivals);
  void tell_loss();
  // After break_rail(), where no completion may follow. Requires: no lock.
  void settle_break(Endings& endings);
  // All below require mutex_, and collect what has ended.
  void pump(Endings& endings);
  void pump_data(Endings& endings);
  void pump_messages();
  bool ring();
  QueuePair* rail_for(Progress& progress);
  Piece cut_piece(const Progress& progress) const;
  void advance(Progress& progress, std::uint64_t nbytes) const;
  void add_piece(QueuePair& pair, const Piece& piece);
  void add_flushes(Progress& progress);
  void finish_posting(Progress& progress);
  void watch_for_sleeper(Progress& progress);
  void give_up_rest(Progress& progress, Endings& endings);
  void take_completion(QueuePair& pair, const ibv_wc& completion, Endings& endings);
  void came_back(QueuePair& pair, const Posted& entry, bool is_ok, Endings& endings);
  void finish_if_over(Progress& progress, Endings& endings);
  QueuePair* pair_for_message(MessageType type);
  void queue_message(MessageType type, Code code, std::span<const std::byte> body,
                     std::size_t rail, std::uint64_t sequence = 0);
  void send_message(QueuePair& pair, Message& message, Progress* progress);
  void take_message(const Message& message, Endings& endings);
  void take_fence_ask(const Message& message, Endings& endings);
  void answer_fences();
  bool must_tell_taken() const;
  // Says whether pump() would find anything to do.
  bool must_pump() const;
  bool is_revoked(FenceTicket grant) const;
  bool has_live_rail() const;
  bool are_all_drained() const;
  void break_rail(QueuePair& pair, const std::string& why);
  void look_at_broken_rails(Endings& endings);
  void release_orphans(std::size_t rail, Endings& endings);
  void lose_locked(Status why, Endings& endings);

  // Needs no lock.
  Status find_keys(const Operation& operation, std::vector<Registration*>& out) const;

  TransportHost& host_;
  Poller& poller_;
  const std::uint32_t peer_depth_;
  const ChannelPeer peer_;
  const std::size_t rail_count_;
  const std::uint32_t most_still_;  // Looks of watch() without a completion.
  std::size_t most_sges_ = SIZE_MAX;

  // What the threads of this process share.
  struct Shared {
    mutable std::mutex mutex;  // Guards all of it but the atomics.
    std::atomic<std::uint32_t> completions_waiting{0};  // Threads that have some, and want the mutex.
    std::condition_variable changed;  // Credits came, a fence was answered, the channel is lost.
    std::atomic<bool> is_lost{false};
    Status lost_why;
    bool must_tell_loss = false;

    std::vector<std::unique_ptr<QueuePair>> pairs;  // By rail; those that never connected are broken.
    std::vector<bool> is_closed_there;  // Nothing that the peer had on that rail is under way.
    std::vector<bool> has_said_close;   // The peer was asked to close its side,
    std::vector<bool> has_said_closed;  // and told that ours is empty.
    std::vector<std::string> why_out;   // By rail: why it was never connected, or broke.
    std::string last_break;             // Why the rail that broke last did.
    std::vector<std::vector<Piece>> orphans;        // By rail: came back unfinished when it broke.

    std::vector<std::unique_ptr<Progress>> progresses;
    std::vector<Progress*> free_progresses;
    std::vector<Progress*> running;  // Every operation that has not ended.
    std::uint64_t posts = 0;         // Operations that were posted, ever.
    std::deque<Progress*> to_post;   // Of those, the ones with bytes that were not posted.
    std::deque<Piece> again;         // Pieces of a rail that broke.
    std::vector<Progress*> to_flush;  // Over, but for flushes that there was no room for.

    std::deque<Message> outgoing;
    std::uint64_t next_sequence = 1;
    std::uint64_t seen_until = 0;       // All messages up to this one were taken,
    std::set<std::uint64_t> seen_more;  // and these.

    std::uint64_t reserved_tags = 0;   // Credits that were given for tags of ours, ever.
    std::uint64_t peer_taken = 0;      // Tags of ours that left the peer's inbox, ever.
    bool has_asked_for_credit = false;
    std::uint64_t received_tags = 0;
    std::uint64_t taken_tags = 0;
    std::uint64_t told_taken = 0;
    bool is_asked_for_credit = false;

    std::unordered_map<std::uint32_t, AskedFence> asked;
    std::uint64_t next_fence = 1;
    std::unordered_map<std::uint32_t, std::uint64_t> revoked;  // Slot: the last epoch that ended.
    std::vector<FenceToAnswer> to_answer;

    std::vector<Message> arrivals;  // Taken, and not handed on yet: with no lock but the rail's.
    std::atomic<bool> is_open{false};  // The engine takes arrivals: it has drained once.
  };
  Shared shared_;
  Patience patience_;  // How long a waiter looks at the queues itself.
};

}  // namespace kvzc::rdma

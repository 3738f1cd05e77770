// ShmChannel: operations to one peer on this host, copied straight from source to target.
#pragma once

#include <atomic>

#include "base/doorbell.h"
#include "base/fence_board.h"
#include "base/gated_copy.h"
#include "base/mutex.h"
#include "base/process.h"
#include "kvzc/transport.h"
#include "transport/shm/copy_pool.h"
#include "transport/shm/outbox.h"
#include "transport/shm/peer_memory.h"

namespace kvzc::shm {

// What a peer gave of itself when the channel was set up.
struct PeerSide {
  Outbox outbox;                    // The peer writes, we drain.
  Doorbell doorbell;                // We ring, the peer sleeps.
  FenceBoard fences;                // The peer moves epochs on, we read.
  std::uint32_t arrival_depth = 0;  // Tags of ours that its inbox holds.
  bool shows_threads = false;       // Its threads have the numbers that /proc shows here.
};

class ShmChannel final : public Channel {
 public:
  ShmChannel(TransportHost& host, CopyPool& pool, Outbox outbox, PeerSide side,
             const ChannelPeer& peer);

  void post(Operation& operation) override;
  std::optional<Status> do_now(const SmallOperation& operation) override;
  bool is_prompt() const override { return true; }
  void help(Operation& operation, std::int64_t deadline_ns) override;
  void abort(Operation& operation) override;
  Status take_credit(std::size_t tag_bytes) override;
  void return_credit(std::size_t tag_bytes) override;
  void wait_for_credit(std::size_t tag_bytes, std::int64_t timeout_ns) override;
  void send_tag(const Tag& tag, Code code) override;
  Status look_at_grant(FenceTicket grant) override;
  void drain() override;
  void grant_credits(std::uint32_t count) override;
  Status fence(std::span<const FenceTicket> grants, std::int64_t deadline_ns) override;
  Status cut_off(std::int64_t deadline_ns) override;
  void lose(Status why, PeerFate fate) override;
  Status lost() const override;
  bool is_quiet() const override;
  std::string explain(const RemoteMemory& memory) const override {
    return static_cast<const PeerMemory&>(memory).path();
  }

 private:
  // What the threads of this process share.
  struct Shared {
    std::atomic<bool> is_gone{false};
    std::atomic<bool> is_lost{false};
    mutable Mutex lost_mutex;
    Status lost_why KVZC_GUARDED_BY(lost_mutex);

    Mutex send_mutex;             // Guards the next six.
    // Ring bytes, and tags, that credits were given for, ever.
    std::uint64_t reserved_bytes KVZC_GUARDED_BY(send_mutex) = 0;
    std::uint64_t reserved_tags KVZC_GUARDED_BY(send_mutex) = 0;
    std::uint64_t tail KVZC_GUARDED_BY(send_mutex) = 0;
    std::uint64_t kicked_head KVZC_GUARDED_BY(send_mutex) = ~std::uint64_t{0};
    // The reader's positions when they were last looked at.
    std::uint64_t seen_head KVZC_GUARDED_BY(send_mutex) = 0;
    std::uint64_t seen_taken KVZC_GUARDED_BY(send_mutex) = 0;

    Mutex drain_mutex;  // Guards the next two.
    std::uint64_t head KVZC_GUARDED_BY(drain_mutex) = 0;
    std::uint64_t received_tags KVZC_GUARDED_BY(drain_mutex) = 0;
    std::atomic<std::uint64_t> drained{0};  // As head, once what came is in the inbox.
    std::atomic<std::uint64_t> taken_tags{0};
  };

  enum class Room { kYes, kRingFull, kInboxFull };
  Room room_for(std::size_t tag_bytes) KVZC_REQUIRES(shared_.send_mutex);

  void cut_chunks(Operation& operation) const;
  void run_chunk(Operation& operation, const Chunk& chunk);
  Status copy_chunk(const Operation& operation, const Chunk& chunk);
  // Says why the gate of `operation` is shut.
  Status why_shut();
  void finish(Operation& operation);
  CopyGate gate_of(FenceTicket grant) const {
    return {side_.fences.word(grant.slot), grant.epoch, &outbox_.page().reader.is_cut};
  }
  Status copy_small(const SmallOperation& operation, PeerMemory& memory);
  void write_tag(std::string_view tag, Code code);
  void kick_if_stuck(std::uint64_t head) KVZC_REQUIRES(shared_.send_mutex);

  // Looks at the thread of the peer's that set `mark`.
  ThreadLook look_at(std::uint64_t mark) const;
  // Says whether that look shows, or the peer's end does, that it never writes again.
  bool is_over(const ThreadLook& look) const;
  Status why_not_cut(std::uint64_t mark, const ThreadLook& look);

  TransportHost& host_;
  CopyPool& pool_;
  const Outbox outbox_;
  const PeerSide side_;
  const ChannelPeer peer_;
  Shared shared_;
};

}  // namespace kvzc::shm

// Transport and Channel: the contract that every fabric keeps.
//
// A Transport is one fabric in this process: it says how a peer can reach local memory and imports
// what a peer said. A Channel carries resolved operations to one peer over that fabric. Neither
// ever sees a region, a handle, an endpoint or an engine: an operation reaches it as runs of
// (local pointer, remote offset, length), and what it learns goes to the two sinks of its host.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvzc/completion.h"
#include "kvzc/status.h"

namespace kvzc {

class Doorbell;
class FenceBoard;
class OwnedFd;
class SharedMemory;
class Channel;

inline constexpr std::size_t kMaxTagBytes = 240;

enum class Direction : std::uint8_t { kPut, kGet };
// What a peer may do with memory.
enum class Access : std::uint8_t { kPut = 1, kGet = 2, kBoth = 3 };

// A tag of up to kMaxTagBytes bytes, held in place.
struct Tag {
  std::uint8_t nbytes = 0;
  std::byte bytes[kMaxTagBytes];

  std::string_view view() const { return {reinterpret_cast<const char*>(bytes), nbytes}; }
};

// What transports keep with a piece of local memory: keys and pinned pages. It goes with the memory,
// never later, so that no key outlives what it names. Thread: any.
class Registrations {
 public:
  Registrations() = default;
  ~Registrations() {
    for (const Kept* each = first_.load(); each != nullptr;) delete std::exchange(each, each->next);
  }
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  // Gives what `owner` keeps here for this access, or null. Cost: no lock.
  template <typename T>
  T* find(const void* owner, Access access) const {
    const Kept* const kept = look(owner, access);
    return kept == nullptr ? nullptr : static_cast<T*>(kept->what.get());
  }
  // The same, made by `make()` where there is none yet. Errors: those of `make`, which is called again
  // next time.
  template <typename T, typename Make>
  Result<std::shared_ptr<T>> find_or_make(const void* owner, Access access, const Make& make) {
    std::lock_guard lock(mutex_);
    if (const Kept* kept = look(owner, access)) return std::static_pointer_cast<T>(kept->what);
    Result<std::shared_ptr<T>> made = make();
    if (made.is_ok()) {
      first_.store(new Kept{owner, access, *made, first_.load(std::memory_order_relaxed)},
                   std::memory_order_release);
    }
    return made;
  }

 private:
  struct Kept {
    const void* owner;
    Access access;
    std::shared_ptr<void> what;
    const Kept* next;
  };
  const Kept* look(const void* owner, Access access) const {
    const Kept* each = first_.load(std::memory_order_acquire);
    while (each != nullptr && (each->owner != owner || each->access != access)) each = each->next;
    return each;
  }
  std::mutex mutex_;  // Of those who add.
  std::atomic<const Kept*> first_{nullptr};
};

// Local memory as a transport sees it. Borrows everything.
struct MemoryPiece {
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  const SharedMemory* shared = nullptr;     // What it lies in, if that can be mapped elsewhere.
  Registrations* registrations = nullptr;  // Null: none may be kept.
};

// Bytes and descriptors that travel to a peer over the control connection.
struct Blob {
  std::vector<std::byte> bytes;
  std::vector<OwnedFd> fds;

  Blob();
  ~Blob();
  Blob(Blob&&) noexcept;
  Blob& operator=(Blob&&) noexcept;
};

// A peer's memory, reachable through one transport. Destroying it lets go of mapping or key.
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;
  virtual std::uint64_t nbytes() const = 0;
  // Where both are the same physical memory, so that a copy could run into itself: gives where
  // `piece` begins, counted from where this begins.
  virtual std::optional<std::int64_t> offset_of(const MemoryPiece& piece) const = 0;
};

// Who is at the other end, as the kernel says.
struct PeerProcess {
  std::int32_t pid = 0;  // As seen from here; 0: in a pid namespace that is not visible.
  std::uint32_t uid = 0;
  int pidfd = -1;  // Borrowed from the endpoint. -1: the kernel gave none.
};

// One contiguous piece of an operation, contiguous on both sides.
struct Run {
  std::byte* local;
  std::uint64_t remote;  // Offset within the segment's remote memory.
  std::uint64_t nbytes;
};

// Consecutive runs of one operation that touch the same memory on either side.
struct Segment {
  std::uint32_t first_run;
  std::uint32_t run_count;
  RemoteMemory* remote;
  MemoryPiece local{};
};

// Where the owner of a grant keeps its epoch, and the epoch at which the grant holds.
struct FenceTicket {
  std::uint32_t slot = 0;
  std::uint64_t epoch = 0;
};

// A bounded part of an operation, done as a whole under one look at the fence.
struct Chunk {
  std::uint32_t segment;
  std::uint32_t first_run;
  std::uint64_t skip_bytes;  // Bytes of first_run that earlier chunks cover.
  std::uint64_t nbytes;
};

// One accepted put or get on its way. The engine fills it, the channel moves it, and the channel
// retires it exactly once through OperationSink. Counted: whoever looks at it holds a reference.
struct Operation {
  TransferState state;

  Direction direction = Direction::kPut;
  bool has_tag = false;  // A credit for it is taken before the operation is posted.
  Tag tag;
  FenceTicket fence;
  std::uint64_t nbytes = 0;
  std::vector<Run> runs;
  std::vector<Segment> segments;
  std::uint64_t after = 0;  // Opaque: what the source waits for on its device.

  // The channel it runs on; null while it waits for one. Thread: any.
  std::atomic<Channel*> channel{nullptr};

  // The channel's own book-keeping.
  std::vector<Chunk> chunks;
  std::atomic<std::uint32_t> next_chunk{0};
  std::atomic<std::uint32_t> chunks_left{0};
  void* progress = nullptr;

  // Gives it a reason to end other than done; the first one counts. Parts of it that have not
  // begun will not. Thread: any.
  void fail(Status why);
  // Sequentially consistent, like fail(): of two threads, one of which fails it and then looks for
  // its channel while the other sets the channel and then looks here, one sees the other.
  bool has_failed() const { return failed_.load(std::memory_order_seq_cst); }
  // Gives the reason, or ok. Thread: any.
  Status failure() const;
  void clear_failure();

  // Requires: nobody refers to it.
  void begin_references(std::uint32_t count) { references_.store(count, std::memory_order_relaxed); }
  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  // Gives whether this was the last reference.
  [[nodiscard]] bool release() { return references_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::atomic<std::uint32_t> references_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  Status failure_;  // Guarded by failure_mutex_.
};

// A put or get of one run that is over before its caller goes on: nobody else ever sees it, so that it
// needs no slot, no list and no end to be told of.
struct SmallOperation {
  Direction direction;
  RemoteMemory* remote;
  Run run;
  FenceTicket fence;
  const std::string_view* tag;  // Null: none.
};

// Where channels report the end of operations. Thread: any.
class OperationSink {
 public:
  virtual ~OperationSink() = default;
  // Takes back an operation that is quiet: not one more byte of it moves.
  virtual void retire(Operation& operation, Status status) = 0;
  // Takes an additional reference / drops it.
  virtual void retain(Operation& operation) = 0;
  virtual void release(Operation& operation) = 0;
  // A thread has looked for so long whether an operation has ended, and has done nothing for it.
  virtual void waited(std::int64_t) {}
};

// Where channels report what comes from their peers. Thread: any.
class PeerSink {
 public:
  virtual ~PeerSink() = default;
  // A tag came in on the channel made with `peer_token`; `code` is not kOk when the transfer that
  // carried it failed. All bytes of a good one are readable.
  virtual void arrived(std::uint64_t peer_token, std::string_view tag, Code code) = 0;
  // The channel made with `peer_token` has found out by itself that it is lost.
  virtual void channel_lost(std::uint64_t peer_token) = 0;
};

struct TransportTuning {
  std::uint32_t copy_threads = 0;             // 0: one less than the cores, at most 4, at least 1.
  std::uint64_t inline_bytes = 128u << 10;    // Up to this the caller copies by itself.
  std::uint64_t chunk_bytes = 256u << 10;     // A revoke waits for at most one chunk per thread.
  std::uint64_t streaming_bytes = 1u << 20;   // From this on copies bypass the cache.
  std::uint32_t tag_ring_bytes = 256u << 10;  // Per peer and direction, a power of two.
  std::uint32_t arrival_depth = 65536;        // Tags per peer that nobody has taken yet.
};

// How RDMA devices are used.
struct RdmaOptions {
  std::vector<std::string> devices;  // Names, the first is rail 0. Empty: all that have a port up.
  int gid_index = -1;                // -1: chosen; else this one, on every device.
  std::uint8_t traffic_class = 0;
  std::uint8_t service_level = 0;
  std::uint8_t ack_timeout = 14;  // 4.096 us x 2^n until a packet is sent again ...
  std::uint8_t retries = 7;       // ... so often.
  std::uint32_t queue_depth = 256;                // Work requests per queue pair, at most.
  std::uint64_t most_request_bytes = 1u << 20;    // A longer run is cut.
  std::uint64_t most_outstanding_bytes = 8u << 20;  // Per peer and rail: a cancel waits for these.
  std::uint64_t least_striped_bytes = 256u << 10;   // Shorter transfers stay on one rail.
  bool always_flush = false;  // Also read back where an acknowledgement is visibility already.
};

// What an engine lends to its transports; all of it outlives them.
struct TransportHost {
  Doorbell& doorbell;
  FenceBoard& fences;
  OperationSink& operations;
  PeerSink& peers;
  TransportTuning tuning;
  RdmaOptions rdma{};
};

// What is known of a peer that a channel has lost.
enum class PeerFate {
  kGone,     // Its process has exited or its engine has closed: no thread of it writes any more.
  kUnknown,  // It may still be writing.
};

class Channel {
 public:
  virtual ~Channel() = default;

  // --- Initiator side. Thread: any. ---

  // Takes an operation over and ends it exactly once, now or later. Cost: small ones are copied
  // before this returns; never blocks otherwise.
  virtual void post(Operation& operation) = 0;
  // Does a small operation at once, with its tag, and says how it ended; or gives nothing, having done
  // nothing, where that would take long or must wait: then it is to be posted.
  virtual std::optional<Status> do_now(const SmallOperation&) { return std::nullopt; }
  // Says whether do_now() ever does anything.
  virtual bool is_prompt() const { return false; }
  // Does a share of the operation's work on this thread; returns when nothing is left to begin, or
  // soon after the deadline.
  virtual void help(Operation& operation, std::int64_t deadline_ns) = 0;
  // A thread will sleep until the operation has ended, and not help any more: from here on the
  // channel sees to it without anybody's calls, and at once. Never blocks.
  virtual void will_sleep(Operation&) {}
  // Passes over what has not begun of an operation that was posted here and has failed, so that it
  // ends as soon as what has begun is over. Never blocks.
  virtual void abort(Operation& operation) = 0;
  // Takes the credit for one tag. Errors: kWouldBlock when the peer's inbox is full; the cause
  // when the channel is lost.
  virtual Status take_credit(std::size_t tag_bytes) = 0;
  // Gives a credit back that no tag was sent for.
  virtual void return_credit(std::size_t tag_bytes) = 0;
  // Sleeps until a credit for such a tag may be there, at most `timeout_ns`.
  virtual void wait_for_credit(std::size_t tag_bytes, std::int64_t timeout_ns) = 0;
  // Sends a tag without data, after a credit was taken for it.
  virtual void send_tag(const Tag& tag, Code code) = 0;
  // Says whether a grant still holds, as far as can be seen from here. Errors: kRevoked.
  virtual Status look_at_grant(FenceTicket grant) = 0;

  // --- Target side. Thread: any. ---

  // Hands every tag that has come in to the arrival sink.
  virtual void drain() = 0;
  // Looks for what has come in and rings the doorbell only when somebody looks: a thread that waits
  // does so again and again. Cost: next to nothing.
  virtual void look() {}
  // A thread that looked goes to sleep until something comes in: from here on the channel sees to it
  // by itself, and at once / it is awake. Never blocks.
  virtual void begin_rest() {}
  virtual void end_rest() {}
  // Gives the peer `count` credits back.
  virtual void grant_credits(std::uint32_t count) = 0;
  // Returns once the peer can no longer touch memory through any of these grants, whose epochs were
  // moved on. Requires: they are sorted by slot. Errors: kTimedOut.
  virtual Status fence(std::span<const FenceTicket> grants, std::int64_t deadline_ns) = 0;
  // Takes the peer's way to all memory of this side, without its help; returns once it cannot touch
  // one more byte. Requires: lose() was called. Errors: kTimedOut; kUnsupported with the reason
  // when nothing on this side can stop what it has begun.
  virtual Status cut_off(std::int64_t deadline_ns) = 0;

  // --- Both. Thread: any. ---

  // Makes everything on this channel fail with `why`; the first cause counts, a peer's being gone
  // counts whenever it is said.
  virtual void lose(Status why, PeerFate fate) = 0;
  // Gives why it is lost, or ok.
  virtual Status lost() const = 0;
  // Says whether nothing that this side began is still moving bytes.
  virtual bool is_quiet() const = 0;
  // Says to people which way bytes go to this memory of the peer's, and what would make it faster.
  virtual std::string explain(const RemoteMemory& memory) const = 0;
};

// What a channel is told of its peer.
struct ChannelPeer {
  std::uint64_t token = 0;  // For the sinks.
  PeerProcess process;
  // Asks the peer's engine, by the control connection, to drain; gives whether the question was
  // sent. Thread: any.
  bool (*kick)(void*) = nullptr;
  void* kick_context = nullptr;
};

// One half of a channel, before the other side's half is known.
class ChannelHalf {
 public:
  virtual ~ChannelHalf() = default;
  // Gives what the peer needs to build the other half. Called once.
  virtual Result<Blob> offer() = 0;
  // Joins both halves.
  virtual Result<std::unique_ptr<Channel>> join(Blob peer_offer, const ChannelPeer& peer) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Gives a constant, terminated text.
  virtual const char* name() const = 0;
  // Says whether it reaches peers of the same host only: what it offers may carry descriptors.
  virtual bool is_local() const = 0;
  // Says whether it can keep a peer that may only get from putting, and the other way round.
  virtual bool enforces_access() const = 0;
  // Says how a peer reaches this memory, for no more than this access where it can be enforced.
  // Errors: kTransportUnavailable with reason and remedy; others where it may work later.
  virtual Result<Blob> describe(const MemoryPiece& piece, Access access) = 0;
  // Reaches memory that the peer described. Errors: kTransportUnavailable with reason and remedy
  // when it cannot be reached this way; others end the connection.
  virtual Result<std::shared_ptr<RemoteMemory>> import_memory(Blob description,
                                                              std::uint64_t nbytes,
                                                              const PeerProcess& owner) = 0;
  virtual Result<std::unique_ptr<ChannelHalf>> open_channel() = 0;
  // Does what the first transfer of this memory would have to do. Errors: kLimitExceeded with what was
  // asked, what is allowed and the remedy; kTransportUnavailable.
  virtual Status prepare(const MemoryPiece& piece) = 0;
  // Ends the transport's threads. Operations that are still queued are finished first. Gives false when
  // a thread stands in a copy at the deadline: memory may be slow to answer, or never answer. The
  // thread goes on where it stands, so the transport and all that it uses must stay for ever.
  [[nodiscard]] virtual bool stop(std::int64_t deadline_ns) = 0;
};

}  // namespace kvzc

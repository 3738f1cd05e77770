#include "transport/shm/shm_channel.h"

#include <time.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/copy.h"
#include "base/futex.h"
#include "base/gated_copy.h"
#include "base/prefetch.h"
#include "base/process.h"

namespace kvzc::shm {
namespace {

// A record's header in the ring, followed by the tag padded to eight bytes.
struct RecordHeader {
  std::uint8_t tag_bytes;
  std::uint8_t code;
  std::uint8_t zero[6];
};
static_assert(sizeof(RecordHeader) == kRecordHeaderBytes);

// Marks this writer busy on a grant for as long as it lives.
class BusyGuard {
 public:
  BusyGuard(OutboxPage& page, std::uint64_t mark) {
    // Threads start at different places, so that each mostly finds its own still in its cache.
    auto at = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(this) >> 14);
    for (;; ++at) {
      place_ = &page.busy[at % kBusyMarks].mark;
      std::uint64_t idle = 0;
      // Sequentially consistent: the look at the epoch must not move before it.
      if (place_->compare_exchange_strong(idle, mark, std::memory_order_seq_cst)) return;
      if (at % kBusyMarks == 0) cpu_relax();
    }
  }
  ~BusyGuard() { place_->store(0, std::memory_order_release); }
  BusyGuard(const BusyGuard&) = delete;
  BusyGuard& operator=(const BusyGuard&) = delete;

 private:
  std::atomic<std::uint64_t>* place_;
};

// Looks at a mark before others than the writer are asked.
constexpr int kQuickLooks = 1000;
constexpr std::int64_t kMarkLookNs = 50'000;
constexpr std::int64_t kThreadLookNs = 2'000'000;

void pause_briefly(std::int64_t pause_ns) {
  const timespec pause{0, pause_ns};
  nanosleep(&pause, nullptr);
}

}  // namespace

ShmChannel::ShmChannel(TransportHost& host, CopyPool& pool, Outbox outbox, PeerSide side,
                       const ChannelPeer& peer)
    : host_(host),
      pool_(pool),
      outbox_(std::move(outbox)),
      side_(std::move(side)),
      peer_(peer) {}

// --- Data ---

void ShmChannel::post(Operation& operation) {
  try {
    cut_chunks(operation);
  } catch (const std::bad_alloc&) {
    operation.chunks.clear();
    operation.fail(Status::out_of_memory());
  }
  const auto count = static_cast<std::uint32_t>(operation.chunks.size());
  const bool is_small = operation.nbytes <= host_.tuning.inline_bytes;
  // Nobody may claim a chunk of a small operation: this thread does them all.
  operation.next_chunk.store(is_small ? count : 0, std::memory_order_relaxed);
  operation.chunks_left.store(count, std::memory_order_relaxed);
  if (!is_small && count > 0) {
    // From the store on, waiters help: they may end the operation and drop it before this thread
    // has queued it.
    host_.operations.retain(operation);
    operation.channel.store(this, std::memory_order_release);
    pool_.submit(operation);
    host_.operations.release(operation);
    return;
  }
  operation.channel.store(this, std::memory_order_release);
  for (const Chunk& chunk : operation.chunks) run_chunk(operation, chunk);
  finish(operation);
}

std::optional<Status> ShmChannel::do_now(const SmallOperation& operation) {
  auto& memory = static_cast<PeerMemory&>(*operation.remote);
  // No more than a chunk: so long a revoke waits at most.
  const std::uint64_t most = std::min(host_.tuning.inline_bytes, host_.tuning.chunk_bytes);
  if (memory.data() == nullptr || operation.run.nbytes > most) return std::nullopt;
  if (operation.tag == nullptr) return copy_small(operation, memory);
  // The peer has read them since they were written last.
  if (operation.direction == Direction::kPut) prefetch_to_write(memory.data() + operation.run.remote);
  prefetch_to_write(&outbox_.page().writer.tail);
  prefetch_to_write(outbox_.at(outbox_.page().writer.tail.load(std::memory_order_relaxed)));
  if (!take_credit(operation.tag->size()).is_ok()) return std::nullopt;
  Status copied;
  try {
    copied = copy_small(operation, memory);
  } catch (const std::bad_alloc&) {
    // None was left to say what went wrong with. The credit was taken, so that the tag goes nevertheless.
    copied = Status::out_of_memory();
  }
  write_tag(*operation.tag, copied.code());
  return copied;
}

Status ShmChannel::copy_small(const SmallOperation& operation, PeerMemory& memory) {
  const BusyGuard busy(outbox_.page(), BusyMark::make(operation.fence.slot, this_thread_number(),
                                                      can_restart()));
  // All looks after the mark, as in run_chunk().
  if (shared_.is_lost.load(std::memory_order_seq_cst)) return lost();
  const Run& run = operation.run;
  std::byte* const remote = memory.data() + run.remote;
  const bool is_put = operation.direction == Direction::kPut;
  const bool streaming = run.nbytes >= host_.tuning.streaming_bytes;
  if (!gated_copy(is_put ? remote : run.local, is_put ? run.local : remote, run.nbytes, streaming,
                  gate_of(operation.fence))) {
    return why_shut();
  }
  if (streaming) copy_fence();
  return Status::ok();
}

void ShmChannel::cut_chunks(Operation& operation) const {
  operation.chunks.clear();
  const std::uint64_t limit = host_.tuning.chunk_bytes;
  for (std::uint32_t at = 0; at < operation.segments.size(); ++at) {
    const Segment& segment = operation.segments[at];
    Chunk chunk{at, segment.first_run, 0, 0};
    for (std::uint32_t i = 0; i < segment.run_count; ++i) {
      const std::uint32_t run = segment.first_run + i;
      std::uint64_t left = operation.runs[run].nbytes;
      // A run that fits is not torn, unless it is the chunk's first and larger than a chunk.
      while (left > 0) {
        if (chunk.nbytes != 0 && chunk.nbytes + left > limit) {
          operation.chunks.push_back(chunk);
          chunk = {at, run, operation.runs[run].nbytes - left, 0};
        }
        const std::uint64_t take = std::min(left, limit - chunk.nbytes);
        chunk.nbytes += take;
        left -= take;
      }
    }
    if (chunk.nbytes != 0) operation.chunks.push_back(chunk);
  }
}

void ShmChannel::help(Operation& operation, std::int64_t deadline_ns) {
  const auto count = static_cast<std::uint32_t>(operation.chunks.size());
  for (;;) {
    // Looked at first, so that idle helpers do not run the counter round.
    if (operation.next_chunk.load(std::memory_order_relaxed) >= count) return;
    if (deadline_ns != INT64_MAX && now_ns() >= deadline_ns) return;
    const std::uint32_t at = operation.next_chunk.fetch_add(1, std::memory_order_acq_rel);
    if (at >= count) return;
    run_chunk(operation, operation.chunks[at]);
    if (operation.chunks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      finish(operation);
      return;
    }
  }
}

void ShmChannel::abort(Operation& operation) {
  // Nothing of a failed one is copied: this only counts the chunks down.
  help(operation, INT64_MAX);
}

Status ShmChannel::why_shut() {
  if (outbox_.page().reader.is_cut.load(std::memory_order_seq_cst) != 0) {
    lose(Status(Code::kPeerLost, "the peer has closed its engine, or cut this one off"), PeerFate::kUnknown);
    host_.peers.channel_lost(peer_.token);
  }
  if (Status why = lost(); !why.is_ok()) return why;
  return Status(Code::kRevoked,
                "the owner has revoked this grant, or closed its region; ask it for a new handle");
}

void ShmChannel::run_chunk(Operation& operation, const Chunk& chunk) {
  if (operation.has_failed()) return;
  auto& memory = static_cast<PeerMemory&>(*operation.segments[chunk.segment].remote);
  // The kernel's copying does not look at epochs.
  const bool is_restartable = memory.data() != nullptr && can_restart();
  BusyGuard busy(outbox_.page(), BusyMark::make(operation.fence.slot, this_thread_number(),
                                                is_restartable));
  // All looks after the mark: whoever waits for marks to clear sees this one, or is seen here.
  if (shared_.is_lost.load(std::memory_order_seq_cst)) {
    operation.fail(lost());
    return;
  }
  if (Status copied = copy_chunk(operation, chunk); !copied.is_ok()) {
    operation.fail(std::move(copied));
  }
}

Status ShmChannel::copy_chunk(const Operation& operation, const Chunk& chunk) {
  const bool is_put = operation.direction == Direction::kPut;
  const bool streaming = operation.nbytes >= host_.tuning.streaming_bytes;
  auto& memory = static_cast<PeerMemory&>(*operation.segments[chunk.segment].remote);
  const CopyGate gate = gate_of(operation.fence);
  std::byte* const base = memory.data();
  // On the stack: a copy thread without memory must not end the process.
  std::array<OtherProcessMemory::Piece, 64> pieces;
  std::size_t piece_count = 0;
  const auto copy_pieces = [&] {
    if (!is_open(gate)) return why_shut();
    return static_cast<OtherProcessMemory&>(memory).copy(
        operation.direction, {pieces.data(), std::exchange(piece_count, 0)});
  };
  std::uint64_t skip = chunk.skip_bytes;
  std::uint64_t left = chunk.nbytes;
  for (const Run* run = &operation.runs[chunk.first_run]; left > 0; ++run) {
    const std::uint64_t take = std::min(run->nbytes - skip, left);
    std::byte* const local = run->local + skip;
    if (base == nullptr) {
      pieces[piece_count++] = {local, run->remote + skip, take};
      if (piece_count == pieces.size()) {
        if (Status copied = copy_pieces(); !copied.is_ok()) return copied;
      }
    } else {
      std::byte* const remote = base + run->remote + skip;
      if (!gated_copy(is_put ? remote : local, is_put ? local : remote, take, streaming, gate)) {
        return why_shut();
      }
    }
    left -= take;
    skip = 0;
  }
  if (base == nullptr) return copy_pieces();
  // Before the busy mark is cleared and before the chunk counts: a streaming store is ordered by
  // nothing else.
  if (streaming) copy_fence();
  return Status::ok();
}

void ShmChannel::finish(Operation& operation) {
  Status why = operation.failure();
  if (operation.has_tag) send_tag(operation.tag, why.code());
  host_.operations.retire(operation, std::move(why));
}

// --- Tags, initiator side ---

ShmChannel::Room ShmChannel::room_for(std::size_t tag_bytes) {
  // As far as it has been seen: looking again fetches the line that the reader writes.
  if (shared_.reserved_bytes + record_bytes(tag_bytes) - shared_.seen_head <= outbox_.ring_bytes() &&
      shared_.reserved_tags - shared_.seen_taken < side_.arrival_depth) {
    return Room::kYes;
  }
  const auto& reader = outbox_.page().reader;
  const std::uint64_t head = reader.head.load(std::memory_order_seq_cst);
  if (shared_.reserved_bytes + record_bytes(tag_bytes) - head > outbox_.ring_bytes()) {
    kick_if_stuck(head);
    return Room::kRingFull;
  }
  const std::uint64_t taken = reader.taken.load(std::memory_order_seq_cst);
  if (shared_.reserved_tags - taken < side_.arrival_depth) {
    shared_.seen_head = head;
    shared_.seen_taken = taken;
    return Room::kYes;
  }
  // Some may be forgotten ones that only have to be looked at.
  if (head != shared_.tail) kick_if_stuck(head);
  return Room::kInboxFull;
}

Status ShmChannel::take_credit(std::size_t tag_bytes) {
  if (shared_.is_lost.load(std::memory_order_acquire)) return lost();
  const MutexLock lock(shared_.send_mutex);
  switch (room_for(tag_bytes)) {
    case Room::kRingFull:
      return Status(Code::kWouldBlock, "the ring of tags to this peer is full");
    case Room::kInboxFull:
      return Status(Code::kWouldBlock,
                    "the peer's inbox is full: it holds " + std::to_string(side_.arrival_depth) +
                        " tags of ours that nobody there has waited for or polled");
    case Room::kYes:
      break;
  }
  shared_.reserved_bytes += record_bytes(tag_bytes);
  ++shared_.reserved_tags;
  return Status::ok();
}

void ShmChannel::return_credit(std::size_t tag_bytes) {
  const MutexLock lock(shared_.send_mutex);
  shared_.reserved_bytes -= record_bytes(tag_bytes);
  --shared_.reserved_tags;
}

void ShmChannel::wait_for_credit(std::size_t tag_bytes, std::int64_t timeout_ns) {
  auto& reader = outbox_.page().reader;
  reader.credit_sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = reader.credit_count.load(std::memory_order_seq_cst);
  bool must_wait = !shared_.is_lost.load(std::memory_order_acquire);
  if (must_wait) {
    // After the sleeper is announced: the peer either sees it, or this sees the room it made.
    const MutexLock lock(shared_.send_mutex);
    must_wait = room_for(tag_bytes) != Room::kYes;
  }
  if (must_wait) futex_wait(reader.credit_count, seen, timeout_ns, FutexScope::kShared);
  reader.credit_sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void ShmChannel::send_tag(const Tag& tag, Code code) { write_tag(tag.view(), code); }

void ShmChannel::write_tag(std::string_view tag, Code code) {
  if (shared_.is_lost.load(std::memory_order_acquire)) return;
  RecordHeader header{};
  header.tag_bytes = static_cast<std::uint8_t>(tag.size());
  header.code = static_cast<std::uint8_t>(code);
  {
    const MutexLock lock(shared_.send_mutex);
    outbox_.write(shared_.tail, &header, sizeof header);
    outbox_.write(shared_.tail + sizeof header, tag.data(), tag.size());
    shared_.tail += record_bytes(tag.size());
    outbox_.page().writer.tail.store(shared_.tail, std::memory_order_seq_cst);
    if (shared_.tail - shared_.seen_head > outbox_.ring_bytes() / 2) {
      shared_.seen_head = outbox_.page().reader.head.load(std::memory_order_acquire);
      if (shared_.tail - shared_.seen_head > outbox_.ring_bytes() / 2) {
        kick_if_stuck(shared_.seen_head);
      }
    }
  }
  side_.doorbell.ring();
}

Status ShmChannel::look_at_grant(FenceTicket grant) {
  return is_open(gate_of(grant)) ? Status::ok() : why_shut();
}

// Nobody at the peer may be waiting or polling: its own thread then empties the ring into the
// inbox. Asked for once per position of the head.
void ShmChannel::kick_if_stuck(std::uint64_t head) {
  if (shared_.kicked_head == head || !peer_.kick(peer_.kick_context)) return;
  shared_.kicked_head = head;
}

// --- Tags, target side ---

void ShmChannel::drain() {
  auto& page = side_.outbox.page();
  prefetch_to_read(side_.outbox.at(shared_.drained.load(std::memory_order_relaxed)));
  // Mostly there is nothing, and that is seen without the lock: `drained` moves when all is in the inbox.
  // Sequentially consistent: whoever has asked to be rung for and then looks here sees it, or is rung.
  if (page.writer.tail.load(std::memory_order_seq_cst) ==
      shared_.drained.load(std::memory_order_acquire)) {
    return;
  }
  const MutexLock lock(shared_.drain_mutex);
  const std::uint64_t tail = page.writer.tail.load(std::memory_order_acquire);
  if (tail == shared_.head) return;
  // The peer is trusted to keep its promises, not to be free of bugs: no length or position from
  // the shared page may lead outside the ring.
  if (tail - shared_.head > side_.outbox.ring_bytes()) {
    lose(Status(Code::kProtocol, "the peer's ring of tags is damaged"), PeerFate::kUnknown);
    return;
  }
  while (shared_.head != tail) {
    RecordHeader header;
    char tag[kMaxTagBytes];
    side_.outbox.read(shared_.head, &header, sizeof header);
    if (header.tag_bytes > kMaxTagBytes || record_bytes(header.tag_bytes) > tail - shared_.head ||
        shared_.received_tags - shared_.taken_tags.load() >= host_.tuning.arrival_depth) {
      lose(Status(Code::kProtocol, "the peer's ring of tags is damaged"), PeerFate::kUnknown);
      return;
    }
    side_.outbox.read(shared_.head + sizeof header, tag, header.tag_bytes);
    shared_.head += record_bytes(header.tag_bytes);
    ++shared_.received_tags;
    host_.peers.arrived(peer_.token, {tag, header.tag_bytes}, code_from_wire(header.code));
  }
  shared_.drained.store(shared_.head, std::memory_order_release);
  page.reader.head.store(shared_.head, std::memory_order_seq_cst);
  if (page.reader.credit_sleepers.load(std::memory_order_seq_cst) != 0) grant_credits(0);
}

void ShmChannel::grant_credits(std::uint32_t count) {
  auto& reader = side_.outbox.page().reader;
  shared_.taken_tags.fetch_add(count);
  reader.taken.fetch_add(count, std::memory_order_seq_cst);
  if (reader.credit_sleepers.load(std::memory_order_seq_cst) != 0) {
    reader.credit_count.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(reader.credit_count, FutexScope::kShared);
  }
}

// --- Fence and loss ---

ThreadLook ShmChannel::look_at(std::uint64_t mark) const {
  if (!side_.shows_threads) return {};
  return look_at_thread(peer_.process.pid, BusyMark::thread(mark), peer_.process.pidfd);
}

bool ShmChannel::is_over(const ThreadLook& look) const {
  return look.state == ThreadLook::State::kGone ||
         shared_.is_gone.load(std::memory_order_acquire) ||
         (peer_.process.pidfd >= 0 && has_exited(peer_.process.pidfd));
}

Status ShmChannel::fence(std::span<const FenceTicket> grants, std::int64_t deadline_ns) {
  // A slot that is in use again was left before: whoever is there now holds another grant.
  const auto is_within = [&](std::uint64_t mark) {
    if (mark == 0) return false;
    const std::uint32_t slot = BusyMark::grant_slot(mark);
    const auto grant =
        std::lower_bound(grants.begin(), grants.end(), slot,
                         [](const FenceTicket& each, std::uint32_t at) { return each.slot < at; });
    return grant != grants.end() && grant->slot == slot &&
           host_.fences.epoch(slot) == grant->epoch + 1;
  };
  for (const auto& place : side_.outbox.page().busy) {
    // One chunk takes some ten microseconds: look often at first, then make room for the writer.
    for (int looks = 0; is_within(place.mark.load(std::memory_order_seq_cst)); ++looks) {
      if (shared_.is_gone.load(std::memory_order_acquire)) return Status::ok();
      if (looks < kQuickLooks) {
        cpu_relax();
        continue;
      }
      const std::uint64_t mark = place.mark.load(std::memory_order_seq_cst);
      if ((looks - kQuickLooks) % 32 == 0 && mark != 0 && is_over(look_at(mark))) break;
      if (now_ns() >= deadline_ns) {
        return Status(Code::kTimedOut, "it was still writing through the grant");
      }
      pause_briefly(kMarkLookNs);
    }
  }
  return Status::ok();
}

Status ShmChannel::cut_off(std::int64_t deadline_ns) {
  side_.outbox.page().reader.is_cut.store(1, std::memory_order_seq_cst);
  for (const auto& place : side_.outbox.page().busy) {
    std::uint64_t mark = 0;
    for (int looks = 0; looks < kQuickLooks; ++looks) {
      mark = place.mark.load(std::memory_order_seq_cst);
      if (mark == 0) break;
      cpu_relax();
    }
    if (mark == 0) continue;
    // Seen after the word above was set. When the thread has been off its processor since, it looks
    // at that word before its next store.
    const ThreadLook first = look_at(mark);
    ThreadLook last = first;
    while (place.mark.load(std::memory_order_seq_cst) == mark && !is_over(last)) {
      if (now_ns() >= deadline_ns) return why_not_cut(mark, last);
      pause_briefly(kThreadLookNs);
      last = look_at(mark);
      if ((mark & BusyMark::kRestartable) != 0 && was_descheduled(first, last)) break;
    }
  }
  shared_.is_gone.store(true, std::memory_order_release);
  return Status::ok();
}

Status ShmChannel::why_not_cut(std::uint64_t mark, const ThreadLook& look) {
  if (!side_.shows_threads) {
    return Status(Code::kUnsupported,
                  "it has not left its copy, and its threads cannot be seen from here (another pid "
                  "namespace), so nothing shows that it will not go on; continue or end it");
  }
  if (look.state == ThreadLook::State::kStopped) {
    return Status(Code::kUnsupported,
                  std::string("it is stopped in the middle of a copy that ") +
                      ((mark & BusyMark::kRestartable) != 0
                           ? "it began a moment ago; try again"
                           : "would go on when it is continued (the kernel's own copying, or a "
                             "kernel or C library without restartable sequences); end it"));
  }
  return Status(Code::kTimedOut, "it has not finished one bounded copy");
}

void ShmChannel::lose(Status why, PeerFate fate) {
  if (fate == PeerFate::kGone) shared_.is_gone.store(true, std::memory_order_release);
  {
    const MutexLock lock(shared_.lost_mutex);
    if (!shared_.lost_why.is_ok()) return;
    shared_.lost_why = std::move(why);
    shared_.is_lost.store(true, std::memory_order_seq_cst);
  }
  auto& reader = outbox_.page().reader;
  reader.credit_count.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(reader.credit_count, FutexScope::kShared);
  host_.doorbell.ring();
}

bool ShmChannel::is_quiet() const {
  const auto& marks = outbox_.page().busy;
  return std::all_of(marks.begin(), marks.end(), [](const auto& place) {
    return place.mark.load(std::memory_order_seq_cst) == 0;
  });
}

Status ShmChannel::lost() const {
  if (!shared_.is_lost.load(std::memory_order_acquire)) return Status::ok();
  const MutexLock lock(shared_.lost_mutex);
  return shared_.lost_why;
}

}  // namespace kvzc::shm

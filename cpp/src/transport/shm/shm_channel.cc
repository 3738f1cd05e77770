#include "transport/shm/shm_channel.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/copy.h"
#include "base/futex.h"

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
  BusyGuard(OutboxPage& page, std::uint32_t grant_slot) {
    // Threads start at different marks, so that each mostly finds its own still in its cache.
    auto at = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(this) >> 14);
    for (;; ++at) {
      mark_ = &page.busy[at % kBusyMarks].grant;
      std::uint64_t idle = 0;
      // Sequentially consistent: the look at the epoch must not move before it.
      if (mark_->compare_exchange_strong(idle, std::uint64_t{grant_slot} + 1,
                                         std::memory_order_seq_cst)) {
        return;
      }
      if (at % kBusyMarks == 0) cpu_relax();
    }
  }
  ~BusyGuard() { mark_->store(0, std::memory_order_release); }
  BusyGuard(const BusyGuard&) = delete;
  BusyGuard& operator=(const BusyGuard&) = delete;

 private:
  std::atomic<std::uint64_t>* mark_;
};

}  // namespace

ShmChannel::ShmChannel(TransportHost& host, CopyPool& pool, Outbox outbox, PeerSide peer,
                       std::uint64_t peer_token, bool (*kick)(void*), void* kick_context)
    : host_(host),
      pool_(pool),
      outbox_(std::move(outbox)),
      peer_(std::move(peer)),
      peer_token_(peer_token),
      kick_(kick),
      kick_context_(kick_context) {}

// --- Data ---

void ShmChannel::post(Operation& operation) {
  cut_chunks(operation);
  const auto count = static_cast<std::uint32_t>(operation.chunks.size());
  const bool is_small = operation.nbytes <= host_.tuning.inline_bytes;
  // Nobody may claim a chunk of a small operation: this thread does them all.
  operation.next_chunk.store(is_small ? count : 0, std::memory_order_relaxed);
  operation.chunks_left.store(count, std::memory_order_relaxed);
  if (!is_small) {
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

void ShmChannel::run_chunk(Operation& operation, const Chunk& chunk) {
  if (operation.has_failed()) return;
  BusyGuard busy(outbox_.page(), operation.fence.slot);
  // Both looks after the mark: whoever waits for marks to clear sees this one, or is seen here.
  if (shared_.is_lost.load(std::memory_order_seq_cst)) {
    operation.fail(lost());
    return;
  }
  if (peer_.fences.epoch(operation.fence.slot) != operation.fence.epoch) {
    operation.fail(Status(Code::kRevoked,
                          "the owner has revoked this grant, or closed its region; ask it for a "
                          "new handle"));
    return;
  }
  copy_chunk(operation, chunk);
}

void ShmChannel::copy_chunk(const Operation& operation, const Chunk& chunk) const {
  const bool is_put = operation.direction == Direction::kPut;
  const bool streaming = operation.nbytes >= host_.tuning.streaming_bytes;
  std::byte* base = static_cast<MappedMemory*>(operation.segments[chunk.segment].remote)->data();
  std::uint64_t skip = chunk.skip_bytes;
  std::uint64_t left = chunk.nbytes;
  for (const Run* run = &operation.runs[chunk.first_run]; left > 0; ++run) {
    const std::uint64_t take = std::min(run->nbytes - skip, left);
    std::byte* remote = base + run->remote + skip;
    std::byte* local = run->local + skip;
    copy_bytes(is_put ? remote : local, is_put ? local : remote, take, streaming);
    left -= take;
    skip = 0;
  }
  // Before the busy mark is cleared and before the chunk counts: a streaming store is ordered by
  // nothing else.
  if (streaming) copy_fence();
}

void ShmChannel::finish(Operation& operation) {
  Status why = operation.failure();
  if (operation.has_tag) send_tag(operation.tag, why.code());
  host_.operations.retire(operation, std::move(why));
}

// --- Tags, initiator side ---

ShmChannel::Room ShmChannel::room_for(std::size_t tag_bytes) {
  const auto& reader = outbox_.page().reader;
  const std::uint64_t head = reader.head.load(std::memory_order_seq_cst);
  if (shared_.reserved_bytes + record_bytes(tag_bytes) - head > outbox_.ring_bytes()) {
    kick_if_stuck(head);
    return Room::kRingFull;
  }
  const std::uint64_t taken = reader.taken.load(std::memory_order_seq_cst);
  if (shared_.reserved_tags - taken < peer_.arrival_depth) return Room::kYes;
  // Some may be forgotten ones that only have to be looked at.
  if (head != shared_.tail) kick_if_stuck(head);
  return Room::kInboxFull;
}

Status ShmChannel::take_credit(std::size_t tag_bytes) {
  if (shared_.is_lost.load(std::memory_order_acquire)) return lost();
  std::lock_guard lock(shared_.send_mutex);
  switch (room_for(tag_bytes)) {
    case Room::kRingFull:
      return Status(Code::kWouldBlock, "the ring of tags to this peer is full");
    case Room::kInboxFull:
      return Status(Code::kWouldBlock,
                    "the peer's inbox is full: it holds " + std::to_string(peer_.arrival_depth) +
                        " tags of ours that nobody there has waited for or polled");
    case Room::kYes:
      break;
  }
  shared_.reserved_bytes += record_bytes(tag_bytes);
  ++shared_.reserved_tags;
  return Status::ok();
}

void ShmChannel::return_credit(std::size_t tag_bytes) {
  std::lock_guard lock(shared_.send_mutex);
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
    std::lock_guard lock(shared_.send_mutex);
    must_wait = room_for(tag_bytes) != Room::kYes;
  }
  if (must_wait) futex_wait(reader.credit_count, seen, timeout_ns, FutexScope::kShared);
  reader.credit_sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void ShmChannel::send_tag(const Tag& tag, Code code) {
  if (shared_.is_lost.load(std::memory_order_acquire)) return;
  RecordHeader header{};
  header.tag_bytes = tag.nbytes;
  header.code = static_cast<std::uint8_t>(code);
  {
    std::lock_guard lock(shared_.send_mutex);
    outbox_.write(shared_.tail, &header, sizeof header);
    outbox_.write(shared_.tail + sizeof header, tag.bytes, tag.nbytes);
    shared_.tail += record_bytes(tag.nbytes);
    outbox_.page().writer.tail.store(shared_.tail, std::memory_order_release);
    const std::uint64_t head = outbox_.page().reader.head.load(std::memory_order_acquire);
    if (shared_.tail - head > outbox_.ring_bytes() / 2) kick_if_stuck(head);
  }
  peer_.doorbell.ring();
}

// Nobody at the peer may be waiting or polling: its own thread then empties the ring into the
// inbox. Asked for once per position of the head.
void ShmChannel::kick_if_stuck(std::uint64_t head) {
  if (shared_.kicked_head == head || !kick_(kick_context_)) return;
  shared_.kicked_head = head;
}

// --- Tags, target side ---

void ShmChannel::drain() {
  auto& page = peer_.outbox.page();
  std::lock_guard lock(shared_.drain_mutex);
  const std::uint64_t tail = page.writer.tail.load(std::memory_order_acquire);
  if (tail == shared_.head) return;
  // The peer is trusted to keep its promises, not to be free of bugs: no length or position from
  // the shared page may lead outside the ring.
  if (tail - shared_.head > peer_.outbox.ring_bytes()) {
    lose(Status(Code::kProtocol, "the peer's ring of tags is damaged"), PeerFate::kUnknown);
    return;
  }
  while (shared_.head != tail) {
    RecordHeader header;
    char tag[kMaxTagBytes];
    peer_.outbox.read(shared_.head, &header, sizeof header);
    if (header.tag_bytes > kMaxTagBytes || record_bytes(header.tag_bytes) > tail - shared_.head ||
        shared_.received_tags - shared_.taken_tags.load() >= host_.tuning.arrival_depth) {
      lose(Status(Code::kProtocol, "the peer's ring of tags is damaged"), PeerFate::kUnknown);
      return;
    }
    peer_.outbox.read(shared_.head + sizeof header, tag, header.tag_bytes);
    shared_.head += record_bytes(header.tag_bytes);
    ++shared_.received_tags;
    host_.arrivals.arrived(peer_token_, {tag, header.tag_bytes}, code_from_wire(header.code));
  }
  page.reader.head.store(shared_.head, std::memory_order_seq_cst);
  if (page.reader.credit_sleepers.load(std::memory_order_seq_cst) != 0) grant_credits(0);
}

void ShmChannel::grant_credits(std::uint32_t count) {
  auto& reader = peer_.outbox.page().reader;
  shared_.taken_tags.fetch_add(count);
  reader.taken.fetch_add(count, std::memory_order_seq_cst);
  if (reader.credit_sleepers.load(std::memory_order_seq_cst) != 0) {
    reader.credit_count.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(reader.credit_count, FutexScope::kShared);
  }
}

// --- Fence and loss ---

Status ShmChannel::fence(FenceTicket grant, std::int64_t deadline_ns) {
  const std::uint64_t busy = std::uint64_t{grant.slot} + 1;
  for (auto& mark : peer_.outbox.page().busy) {
    // One chunk takes some ten microseconds: look often at first, then make room for the writer.
    for (int looks = 0; mark.grant.load(std::memory_order_seq_cst) == busy; ++looks) {
      // No thread of a peer that is gone runs: its mark says nothing any more.
      if (shared_.is_gone.load(std::memory_order_acquire)) return Status::ok();
      if (looks < 1000) {
        cpu_relax();
        continue;
      }
      if (now_ns() >= deadline_ns) {
        return Status(Code::kTimedOut, "a peer was still writing through the grant");
      }
      const timespec pause{0, 50'000};
      nanosleep(&pause, nullptr);
    }
  }
  return Status::ok();
}

void ShmChannel::lose(Status why, PeerFate fate) {
  if (fate == PeerFate::kGone) shared_.is_gone.store(true, std::memory_order_release);
  {
    std::lock_guard lock(shared_.lost_mutex);
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
  return std::all_of(marks.begin(), marks.end(), [](const auto& mark) {
    return mark.grant.load(std::memory_order_seq_cst) == 0;
  });
}

Status ShmChannel::lost() const {
  if (!shared_.is_lost.load(std::memory_order_acquire)) return Status::ok();
  std::lock_guard lock(shared_.lost_mutex);
  return shared_.lost_why;
}

}  // namespace kvzc::shm

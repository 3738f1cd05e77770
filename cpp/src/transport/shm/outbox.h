// Outbox: the shared memory through which one engine writes to one peer, apart from the data.
//
// The writer makes it and both map it. It holds the writer's busy marks, which the peer's fence
// waits for, a word by which the peer cuts the writer off, and a ring of tags, which the peer
// drains. cpp/WIRE.md gives the layout.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/shared_memory.h"
#include "kvzc/status.h"

namespace kvzc::shm {

inline constexpr std::uint32_t kBusyMarks = 64;
inline constexpr std::uint32_t kRecordHeaderBytes = 8;

// What a writer says of itself while it is within a grant; 0 when it is not.
struct BusyMark {
  static constexpr std::uint64_t kSlotMask = (1u << 25) - 1;
  static constexpr std::uint64_t kRestartable = 1u << 31;

  // `is_restartable`: the thread looks at the epoch again whenever it was descheduled.
  static std::uint64_t make(std::uint32_t grant_slot, std::uint32_t thread, bool is_restartable) {
    return std::uint64_t{thread} << 32 | (is_restartable ? kRestartable : 0) |
           (std::uint64_t{grant_slot} + 1);
  }
  // Requires: the mark is not 0.
  static std::uint32_t grant_slot(std::uint64_t mark) {
    return static_cast<std::uint32_t>(mark & kSlotMask) - 1;
  }
  static std::int32_t thread(std::uint64_t mark) { return static_cast<std::int32_t>(mark >> 32); }
};

struct OutboxPage {
  struct alignas(64) BusyPlace {
    std::atomic<std::uint64_t> mark;
  };
  struct alignas(64) WriterSide {
    std::atomic<std::uint64_t> tail;  // Bytes published, ever.
  };
  struct alignas(64) ReaderSide {
    std::atomic<std::uint64_t> head;          // Bytes consumed, ever.
    std::atomic<std::uint64_t> taken;         // Tags that left the inbox, ever.
    std::atomic<std::uint32_t> credit_count;  // Moves on whenever room may have appeared.
    std::atomic<std::uint32_t> credit_sleepers;
    std::atomic<std::uint32_t> is_cut;  // Not 0: the writer must not begin another copy.
  };

  std::array<BusyPlace, kBusyMarks> busy;
  WriterSide writer;
  ReaderSide reader;
  // The ring's bytes follow.

  std::byte* ring() { return reinterpret_cast<std::byte*>(this + 1); }
};

// Other processes map it: this layout is part of the wire format.
static_assert(offsetof(OutboxPage, writer) == 4096 && offsetof(OutboxPage, reader) == 4160 &&
              offsetof(OutboxPage::ReaderSide, credit_count) == 16 &&
              offsetof(OutboxPage::ReaderSide, is_cut) == 24 && sizeof(OutboxPage) == 4224);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// The bytes that a tag takes in the ring.
inline std::uint64_t record_bytes(std::size_t tag_bytes) {
  return kRecordHeaderBytes + (tag_bytes + 7) / 8 * 8;
}

class Outbox {
 public:
  Outbox() = default;
  static Result<Outbox> create(std::uint32_t ring_bytes);
  static Result<Outbox> open(OwnedFd fd, std::uint32_t ring_bytes);

  OutboxPage& page() const { return *reinterpret_cast<OutboxPage*>(memory_.data()); }
  std::uint32_t ring_bytes() const { return ring_bytes_; }
  const SharedMemory& memory() const { return memory_; }

  // Gives where a running position lies.
  const std::byte* at(std::uint64_t position) const {
    return page().ring() + (position & (ring_bytes_ - 1));
  }
  // Copy into / out of the ring at a running position, across its end.
  void write(std::uint64_t at, const void* bytes, std::size_t nbytes) const;
  void read(std::uint64_t at, void* bytes, std::size_t nbytes) const;

 private:
  SharedMemory memory_;
  std::uint32_t ring_bytes_ = 0;
};

}  // namespace kvzc::shm

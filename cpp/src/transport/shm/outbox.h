// Outbox: the shared memory through which one engine writes to one peer, apart from the data.
//
// The writer makes it and both map it. It holds the writer's busy marks, which the peer's fence
// waits for, and a ring of tags, which the peer drains. cpp/WIRE.md gives the layout.
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

struct OutboxPage {
  struct alignas(64) BusyMark {
    std::atomic<std::uint64_t> grant;  // 0: idle; else the grant's slot + 1.
  };
  struct alignas(64) WriterSide {
    std::atomic<std::uint64_t> tail;  // Bytes published, ever.
  };
  struct alignas(64) ReaderSide {
    std::atomic<std::uint64_t> head;          // Bytes consumed, ever.
    std::atomic<std::uint64_t> taken;         // Tags that left the inbox, ever.
    std::atomic<std::uint32_t> credit_count;  // Moves on whenever room may have appeared.
    std::atomic<std::uint32_t> credit_sleepers;
  };

  std::array<BusyMark, kBusyMarks> busy;
  WriterSide writer;
  ReaderSide reader;
  // The ring's bytes follow.

  std::byte* ring() { return reinterpret_cast<std::byte*>(this + 1); }
};

// Other processes map it: this layout is part of the wire format.
static_assert(offsetof(OutboxPage, writer) == 4096 && offsetof(OutboxPage, reader) == 4160 &&
              offsetof(OutboxPage::ReaderSide, credit_count) == 16 && sizeof(OutboxPage) == 4224);
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

  // Copy into / out of the ring at a running position, across its end.
  void write(std::uint64_t at, const void* bytes, std::size_t nbytes) const;
  void read(std::uint64_t at, void* bytes, std::size_t nbytes) const;

 private:
  SharedMemory memory_;
  std::uint32_t ring_bytes_ = 0;
};

}  // namespace kvzc::shm

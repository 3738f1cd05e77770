// What channels say to each other besides data: the bytes of one SEND.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvzc/transport.h"

namespace kvzc::rdma {

enum class MessageType : std::uint8_t {
  kTag = 1,         // A tag; `code` says how its transfer ended.
  kCredit = 2,      // Only the counts of the header, of the rail that is named.
  kCreditAsk = 3,   // The inbox is full for us: say at once when something was taken.
  kFenceAsk = 4,    // The body is a number and tickets: stop using these grants.
  kFenceDone = 5,   // The body is the number: not one more byte comes through them.
  kRailClose = 6,   // Our side of this rail is in error: close yours.
  kRailClosed = 7,  // Ours is in error and empty: nothing of yours lands any more.
};

// Little-endian, as both sides are; cpp/WIRE.md has the layout.
struct MessageHeader {
  MessageType type;
  std::uint8_t code;
  std::uint8_t body_bytes;
  std::uint8_t rail;         // Which one `consumed` and kRail... are about.
  std::uint32_t consumed;    // Messages taken from that rail and room made again, ever.
  std::uint64_t sequence;    // One per message, from 1: one that was sent twice is taken once.
  std::uint64_t taken_tags;  // Tags that left the inbox, ever.
};
static_assert(sizeof(MessageHeader) == 24);

inline constexpr std::size_t kMaxBodyBytes = kMaxTagBytes;
inline constexpr std::size_t kMessageBytes = 264;  // Header and the longest body.
static_assert(sizeof(MessageHeader) + kMaxBodyBytes == kMessageBytes);

struct Message {
  MessageHeader header{};
  std::byte body[kMaxBodyBytes];

  std::size_t nbytes() const { return sizeof header + header.body_bytes; }
};
static_assert(sizeof(Message) == kMessageBytes);

// A ticket in the body of kFenceAsk.
struct FenceEntry {
  std::uint32_t slot;
  std::uint32_t epoch_low;
  std::uint32_t epoch_high;
};

}  // namespace kvzc::rdma

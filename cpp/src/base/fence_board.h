// FenceBoard: the epochs of an engine's grants, readable by every peer on this host.
//
// An even epoch is live, an odd one revoked. A writer marks itself busy, looks at the epoch, copies
// one chunk and clears the mark; the owner moves the epoch on and then waits for the marks. Both
// sides use sequentially consistent operations, so one of them always sees the other.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/shared_memory.h"
#include "kvzc/status.h"

namespace kvzc {

class FenceBoard {
 public:
  FenceBoard() = default;
  static Result<FenceBoard> create(std::uint32_t slots);
  // Opens a peer's, for reading.
  static Result<FenceBoard> open(OwnedFd fd, std::uint32_t slots);
  Result<OwnedFd> share() const { return memory_.read_only_fd(); }

  std::uint32_t slots() const {
    return static_cast<std::uint32_t>(memory_.nbytes() / sizeof(Epoch));
  }
  // Gives an epoch at which no grant holds for a slot that does not exist: it may come from a peer.
  std::uint64_t epoch(std::uint32_t slot) const {
    if (slot >= slots()) return ~std::uint64_t{0};
    return epochs()[slot].load(std::memory_order_seq_cst);
  }
  // Gives where a slot's epoch is, or a word at which no grant holds.
  const std::atomic<std::uint64_t>* word(std::uint32_t slot) const {
    static constexpr std::atomic<std::uint64_t> kNever{~std::uint64_t{0}};
    return slot >= slots() ? &kNever : &epochs()[slot];
  }
  // Owner's side only.
  void set_epoch(std::uint32_t slot, std::uint64_t epoch) {
    epochs()[slot].store(epoch, std::memory_order_seq_cst);
  }

 private:
  using Epoch = std::atomic<std::uint64_t>;
  Epoch* epochs() const { return reinterpret_cast<Epoch*>(memory_.data()); }

  SharedMemory memory_;
};

}  // namespace kvzc

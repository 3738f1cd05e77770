// A copy into memory that its owner may take back at any moment: once its gate is shut it stores
// nothing more, even where the thread was stopped in the middle of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvzc {

// What must hold for a copy to go on. Both words may lie in memory shared with another process;
// neither pointer is null.
struct CopyGate {
  const std::atomic<std::uint64_t>* epoch;
  std::uint64_t expected_epoch;
  const std::atomic<std::uint32_t>* is_cut;  // 0: go on.
};

inline bool is_open(const CopyGate& gate) {
  return gate.epoch->load(std::memory_order_seq_cst) == gate.expected_epoch &&
         gate.is_cut->load(std::memory_order_seq_cst) == 0;
}

// Copies like copy_bytes(), after which see also copy_fence(). Gives false, having stopped, when it
// finds the gate shut: part of the target may then be written.
//
// The gate is looked at before the first store and, where can_restart(), again before the next
// store whenever this thread was descheduled or signalled in between. So whoever shuts the gate and
// then finds that this thread has left its CPU knows that it will not store one more byte. A thread
// that runs on does not look again: it may end the copy that it has begun.
//
// The caller says that it copies with a sequentially consistent read-modify-write before the call.
bool gated_copy(std::byte* target, const std::byte* source, std::size_t nbytes, bool streaming,
                const CopyGate& gate);

// Says whether copies of this thread look again after it was descheduled. That needs x86-64 Linux,
// restartable sequences registered by the C library (glibc 2.35 or later) and a build without
// sanitizers. Elsewhere the gate is looked at once, before the first store.
bool can_restart();

}  // namespace kvzc

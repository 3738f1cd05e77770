// The memcpy kernels: one for bytes that stay near, one that streams past the cache.
#pragma once

#include <cstddef>

namespace kvzc {

// Copies like memcpy. Source and target must not overlap.
//
// `streaming` writes large pieces with non-temporal stores, which spare the target's cache lines
// the read before the write. Such stores are not ordered by a later release store: call
// copy_fence() on the same thread before telling anybody that the bytes are there.
void copy_bytes(std::byte* target, const std::byte* source, std::size_t nbytes, bool streaming);

// Orders all streaming stores of this thread before its next store.
void copy_fence();

// Gives the name of the streaming kernel this machine uses: "avx512", "avx2" or "memcpy".
const char* copy_kernel();

}  // namespace kvzc

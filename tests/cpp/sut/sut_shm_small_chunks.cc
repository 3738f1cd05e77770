// Shared memory with everything made small: several copy threads, many chunks, streaming stores and
// a ring that wraps, also for little data.
#include "conformance/sut.h"

namespace kvzc::conformance {

Sut sut_shm_small_chunks() {
  return {"shm_small_chunks", [] {
            EngineOptions options;
            options.transports = {"shm"};
            options.tuning.copy_threads = 3;
            options.tuning.inline_bytes = 4096;
            options.tuning.chunk_bytes = 4096;
            options.tuning.streaming_bytes = 2048;
            options.tuning.tag_ring_bytes = 4096;
            return options;
          }};
}

}  // namespace kvzc::conformance

// Shared memory where the owner's memory cannot be mapped: the kernel copies, or, between engines of
// one process, they copy straight.
#include "conformance/sut.h"

namespace kvzc::conformance {

Sut sut_shm_private() {
  return {"shm_private",
          [] {
            EngineOptions options;
            options.transports = {"shm"};
            return options;
          },
          MemoryKind::kPrivate};
}

}  // namespace kvzc::conformance

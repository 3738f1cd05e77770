// Shared memory that delays, cuts and shuffles, and fails nothing: every promise still holds.
#include "conformance/sut.h"

namespace kvzc::conformance {

Sut sut_fault() {
  return {"fault", [] {
            EngineOptions options;
            options.transports = {"shm"};
            options.faults.emplace();
            options.faults->stripe_bytes = 64 << 10;
            options.faults->most_delay_seconds = 0.0003;
            options.faults->reorder = true;
            return options;
          }};
}

}  // namespace kvzc::conformance

// Shared memory as users get it.
#include "conformance/sut.h"

namespace kvzc::conformance {

Sut sut_shm() {
  return {"shm", [] {
            EngineOptions options;
            options.transports = {"shm"};
            return options;
          }};
}

}  // namespace kvzc::conformance

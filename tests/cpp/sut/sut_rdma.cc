// RDMA verbs over every device of the machine, each a rail.
#include "conformance/sut.h"

namespace kvzc::conformance {

Sut sut_rdma() {
  return {"rdma",
          [] {
            EngineOptions options;
            options.transports = {"rdma"};
            return options;
          },
          MemoryKind::kSharable, /*is_remote=*/true};
}

}  // namespace kvzc::conformance

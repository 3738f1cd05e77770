// RDMA verbs with everything made small: many requests, many stripes, short queues, and every write
// flushed although the device may be software.
#include "conformance/sut.h"

namespace kvzc::conformance {

Sut sut_rdma_small() {
  return {"rdma_small",
          [] {
            EngineOptions options;
            options.transports = {"rdma"};
            options.rdma.queue_depth = 64;
            options.rdma.most_request_bytes = 4096;
            options.rdma.most_outstanding_bytes = 32768;
            options.rdma.least_striped_bytes = 8192;
            options.rdma.always_flush = true;
            return options;
          },
          MemoryKind::kSharable, /*is_remote=*/true};
}

}  // namespace kvzc::conformance

// RDMA verbs between engines that find each other by TCP alone, as on two hosts.
#include "conformance/sut.h"

namespace kvzc::conformance {

Sut sut_rdma_hosts() {
  return {"rdma_hosts",
          [] {
            EngineOptions options;
            options.transports = {"rdma"};
            options.listen = "127.0.0.1:0";
            options.secret = "the secret of the tests";
            options.peer_timeout_seconds = 2;
            return options;
          },
          MemoryKind::kSharable, /*is_remote=*/true, /*between_hosts=*/true};
}

}  // namespace kvzc::conformance

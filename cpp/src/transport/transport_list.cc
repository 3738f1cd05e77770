#include "transport/transport_list.h"

#include "transport/fault/factory.h"
#include "transport/shm/factory.h"
#if defined(KVZC_WITH_RDMA)
#include "transport/rdma/factory.h"
#endif

namespace kvzc {

namespace {

TransportInfo describe_rdma() {
#if defined(KVZC_WITH_RDMA)
  const Result<std::string> devices = rdma::describe_devices();
  if (devices.is_ok()) return {"rdma", true, "verbs over " + *devices};
  return {"rdma", false, std::string(devices.status().text())};
#else
  return {"rdma", false,
          "this kvzc was built without it: <infiniband/verbs.h> was not there; install "
          "libibverbs-dev and build again"};
#endif
}

}  // namespace

std::vector<TransportInfo> list_transports() {
  return {
      {"ascend", false, "not part of this version: HCCS between NPUs comes in a later one"},
      {"shm", true, "memfd shared between the processes of one host"},
      describe_rdma(),
      {"tcp", false, "not part of this version: sockets come in a later one"},
  };
}

Result<std::unique_ptr<Transport>> make_transport(std::string_view name, TransportHost& host,
                                                  const std::optional<FaultOptions>& faults) {
  if (faults) {
    return fault::make_transport(host, *faults, [name](TransportHost& inner) {
      return make_transport(name, inner, std::nullopt);
    });
  }
  if (name == "shm") return shm::make_transport(host);
#if defined(KVZC_WITH_RDMA)
  if (name == "rdma") return rdma::make_transport(host);
#endif
  for (const TransportInfo& info : list_transports()) {
    if (info.name == name) {
      return Status(Code::kTransportUnavailable, std::string(name) + ": " + info.reason);
    }
  }
  return Status(Code::kInvalidArgument, "there is no transport '" + std::string(name) +
                                            "'; kvzc has shm and rdma, and later tcp and ascend");
}

}  // namespace kvzc

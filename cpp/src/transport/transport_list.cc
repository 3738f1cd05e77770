#include "transport/transport_list.h"

#include "transport/fault/factory.h"
#include "transport/shm/factory.h"

namespace kvzc {

std::vector<TransportInfo> list_transports() {
  return {
      {"ascend", false, "not part of this version: HCCS between NPUs comes in a later one"},
      {"shm", true, "memfd shared between the processes of one host"},
      {"rdma", false, "not part of this version: verbs come in a later one"},
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
  for (const TransportInfo& info : list_transports()) {
    if (info.name == name) {
      return Status(Code::kTransportUnavailable, std::string(name) + ": " + info.reason);
    }
  }
  return Status(Code::kInvalidArgument, "there is no transport '" + std::string(name) +
                                            "'; kvzc has shm, and later tcp, rdma and ascend");
}

}  // namespace kvzc

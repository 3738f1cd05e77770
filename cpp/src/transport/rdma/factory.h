// The door to the room of RDMA verbs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kvzc/status.h"
#include "kvzc/transport.h"

namespace kvzc::rdma {

// Says in words what this machine has of it. Errors: kTransportUnavailable with the remedy.
Result<std::string> describe_devices();

// Errors: kTransportUnavailable, kInvalidArgument, kLimitExceeded.
Result<std::unique_ptr<Transport>> make_transport(TransportHost& host);

}  // namespace kvzc::rdma

// The door to the room of trouble.
#pragma once

#include <functional>
#include <memory>

#include "kvzc/faults.h"
#include "kvzc/status.h"
#include "kvzc/transport.h"

namespace kvzc::fault {

using MakeInner = std::function<Result<std::unique_ptr<Transport>>(TransportHost& host)>;

// Wraps the transport that `make_inner` makes; that one reports to a host of the wrapper's.
Result<std::unique_ptr<Transport>> make_transport(TransportHost& host, const FaultOptions& options,
                                                  const MakeInner& make_inner);

}  // namespace kvzc::fault

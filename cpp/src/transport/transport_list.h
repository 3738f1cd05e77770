// The one way into the rooms of the transports.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "kvzc/faults.h"
#include "kvzc/info.h"
#include "kvzc/status.h"
#include "kvzc/transport.h"

namespace kvzc {

// With `faults`, it makes trouble. Errors: kTransportUnavailable with the reason; kInvalidArgument
// for a name that is none.
Result<std::unique_ptr<Transport>> make_transport(std::string_view name, TransportHost& host,
                                                  const std::optional<FaultOptions>& faults);

}  // namespace kvzc

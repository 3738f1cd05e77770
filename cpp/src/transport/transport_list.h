// The one way into the rooms of the transports.
#pragma once

#include <memory>
#include <string_view>

#include "kvzc/info.h"
#include "kvzc/status.h"
#include "kvzc/transport.h"

namespace kvzc {

// Errors: kTransportUnavailable with the reason; kInvalidArgument for a name that is none.
Result<std::unique_ptr<Transport>> make_transport(std::string_view name, TransportHost& host);

}  // namespace kvzc

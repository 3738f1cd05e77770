// The door to the shared-memory room.
#pragma once

#include <memory>

#include "kvzc/transport.h"

namespace kvzc::shm {

Result<std::unique_ptr<Transport>> make_transport(TransportHost& host);

}  // namespace kvzc::shm

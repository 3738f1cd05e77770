// An RDMA device that moves nothing and completes everything at once: what a transfer still costs
// on it is what the program that uses it costs.
#pragma once

#include "drivers/ibv/ibv.h"

namespace kvzc::bench {

inline constexpr const char* kNullDevice = "null0";

// Gives a table that knows this one device.
ibv::Verbs null_verbs();

}  // namespace kvzc::bench

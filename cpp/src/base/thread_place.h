// A small number for each thread that runs, so that it can have counters of its own.
#pragma once

#include <cstdint>

namespace kvzc {

inline constexpr std::uint32_t kThreadPlaces = 32;

// Gives the calling thread's number, which no other thread of this process has as long as this one
// runs; kThreadPlaces when all are taken. Whoever has a number next sees what this thread has written.
// Cost: a load, after the first time.
std::uint32_t this_thread_place();

}  // namespace kvzc

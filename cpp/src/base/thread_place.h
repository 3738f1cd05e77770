// A small number for each thread that runs, so that it can have counters of its own.
#pragma once

#include <cstdint>

namespace kvzc {

inline constexpr std::uint32_t kThreadPlaces = 32;

// Gives the calling thread's number, which no other thread of this process has as long as this one
// runs; kThreadPlaces when all are taken. Whoever has a number next sees what this thread has written.
// Cost: a load, after the first time.
inline std::uint32_t this_thread_place();

namespace thread_place {
inline constexpr std::uint32_t kUnknown = kThreadPlaces + 1;
extern constinit thread_local std::uint32_t number;
std::uint32_t find();
}  // namespace thread_place

inline std::uint32_t this_thread_place() {
  const std::uint32_t number = thread_place::number;
  return number != thread_place::kUnknown ? number : thread_place::find();
}

}  // namespace kvzc

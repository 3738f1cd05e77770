// Asks for a cache line before it is needed. What another core has just written or read takes as long
// to come as a small put takes in all; asked for early, several come at once.
#pragma once

namespace kvzc {

inline void prefetch_to_read(const void* line) { __builtin_prefetch(line, 0); }

// The line comes as this core's alone, as a store wants it.
inline void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
  // The compiler gives the weaker one unless told that the CPU has this; where it has not, this does
  // nothing.
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

}  // namespace kvzc

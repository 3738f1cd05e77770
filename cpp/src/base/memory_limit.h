// How much memory this process may still take before the kernel kills somebody.
#pragma once

#include <cstdint>
#include <string>

namespace kvzc {

struct MemoryLimit {
  std::uint64_t bytes;  // UINT64_MAX when nothing could be read.
  std::string source;   // What sets it, in words.
};

// Gives the least of what the machine has available and what each memory cgroup around this
// process leaves. Memory for memfd is not refused by the kernel: beyond this it kills.
// root: put before every path that is read, for tests.
MemoryLimit available_memory(const std::string& root = "");

}  // namespace kvzc

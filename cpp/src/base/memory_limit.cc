#include "base/memory_limit.h"

#include <fstream>
#include <sstream>

namespace kvzc {
namespace {

// Gives the number in a file that holds just one, or `otherwise` ("max" is no number).
std::uint64_t read_number(const std::string& path, std::uint64_t otherwise) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? value : otherwise;
}

std::uint64_t machine_available(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::uint64_t total = 0;
  bool is_known = false;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t kib = 0;
    words >> name >> kib;
    if (name != "MemAvailable:" && name != "SwapFree:") continue;
    total += kib * 1024;
    is_known = true;
  }
  return is_known ? total : UINT64_MAX;
}

void narrow(MemoryLimit& limit, std::uint64_t most, std::uint64_t used, const std::string& source) {
  if (most == UINT64_MAX) return;
  const std::uint64_t left = most > used ? most - used : 0;
  if (left < limit.bytes) limit = {left, source};
}

}  // namespace

MemoryLimit available_memory(const std::string& root) {
  MemoryLimit limit{machine_available(root), "the machine's available memory"};
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "hierarchy:controllers:path"
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && controllers != "memory") continue;
    const std::string top = root + (is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    // The group and all around it; within a container the path may not be visible, the root is.
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      const std::string folder = top + path;
      const std::string file = is_v2 ? "memory.max" : "memory.limit_in_bytes";
      narrow(limit, read_number(folder + "/" + file, UINT64_MAX),
             read_number(folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes"), 0),
             "the container's memory limit (" + file + ")");
      if (path.empty() || path.rfind('/') == std::string::npos) break;
    }
  }
  return limit;
}

}  // namespace kvzc

// What this build of kvzc can do on this machine, for people and for tools.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvzc {

struct TransportInfo {
  std::string_view name;
  bool is_available;
  std::string reason;  // In words: what it is, or why it cannot be used.
};

// Lists every transport by name, the preferred first. Thread: any.
std::vector<TransportInfo> list_transports();

}  // namespace kvzc

// "host:port" as a handle and options name it. Only numbers: names would be asked of a server.
#include "base/tcp_socket.h"
#include "fuzz/target.h"

namespace kvzc {

KVZC_FUZZ_TARGET(address)(fuzz::Bytes input) {
  const std::string text(fuzz::as_text(input));
  const std::vector<std::string> reachable = reachable_addresses(text);
  for (const std::string& each : reachable) {
    // What is said to others they can read, as one address.
    if (each == text) continue;
    const std::vector<std::string> again = reachable_addresses(each);
    KVZC_FUZZ_CHECK(again.size() == 1 && again.front() == each);
  }
}

}  // namespace kvzc

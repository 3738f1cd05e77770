// Gives libFuzzer the one target that is linked with it.
#include "fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto& all = kvzc::fuzz::targets();
  if (all.size() != 1) std::abort();
  all.front().run(std::as_bytes(std::span(data, size)));
  return 0;
}

// What the fuzz targets share: how one is declared, how it says that something is wrong, and how it
// takes its input apart.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"

namespace kvzc::fuzz {

using Bytes = std::span<const std::byte>;

struct Target {
  const char* name;
  void (*run)(Bytes input);
};

// Those that this program has: one under libFuzzer, all in the replay.
inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}

// Begins the function of a target; its name is that of its file and of its folder in corpus/.
#define KVZC_FUZZ_TARGET(name)                                              \
  static void fuzz_##name(::kvzc::fuzz::Bytes);                             \
  [[maybe_unused]] static const bool is_known_##name =                      \
      (::kvzc::fuzz::targets().push_back({#name, fuzz_##name}), true);      \
  static void fuzz_##name

// A promise that the input has broken: ends the program, so that the fuzzer keeps the input.
#define KVZC_FUZZ_CHECK(condition)                                                     \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);     \
      std::abort();                                                                    \
    }                                                                                  \
  } while (false)

inline std::string_view as_text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline bool is_equal(Bytes a, Bytes b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Takes an input apart from its front. Beyond the end it gives zeros, so that no input is too short.
class Input {
 public:
  explicit Input(Bytes bytes) : rest_(bytes) {}

  bool is_at_end() const { return rest_.empty(); }
  std::uint8_t u8() {
    const Bytes byte = take(1);
    return byte.empty() ? std::uint8_t{0} : std::to_integer<std::uint8_t>(byte[0]);
  }
  std::uint16_t u16() {
    const std::uint16_t low = u8();
    return static_cast<std::uint16_t>(low | u8() << 8);
  }
  std::uint64_t u64() {
    std::uint64_t out = 0;
    for (int shift = 0; shift < 64; shift += 8) out |= std::uint64_t{u8()} << shift;
    return out;
  }
  Bytes take(std::size_t nbytes) {
    const Bytes out = rest_.first(std::min(nbytes, rest_.size()));
    rest_ = rest_.subspan(out.size());
    return out;
  }
  // So many as the next byte says.
  Bytes part() { return take(u8()); }
  Bytes rest() { return take(rest_.size()); }

 private:
  Bytes rest_;
};

}  // namespace kvzc::fuzz

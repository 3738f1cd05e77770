// 64-bit arithmetic that says when it would wrap.
#pragma once

#include <cstdint>

namespace kvzc {

[[nodiscard]] inline bool add_overflows(std::uint64_t a, std::uint64_t b, std::uint64_t* sum) {
  return __builtin_add_overflow(a, b, sum);
}

[[nodiscard]] inline bool multiply_overflows(std::uint64_t a, std::uint64_t b,
                                             std::uint64_t* product) {
  return __builtin_mul_overflow(a, b, product);
}

[[nodiscard]] inline bool add_overflows(std::int64_t a, std::int64_t b, std::int64_t* sum) {
  return __builtin_add_overflow(a, b, sum);
}

[[nodiscard]] inline bool multiply_overflows(std::int64_t a, std::int64_t b,
                                             std::int64_t* product) {
  return __builtin_mul_overflow(a, b, product);
}

// True when [offset, offset + nbytes) lies within [0, limit), without ever forming the sum.
[[nodiscard]] inline bool range_fits(std::uint64_t offset, std::uint64_t nbytes,
                                     std::uint64_t limit) {
  return nbytes <= limit && offset <= limit - nbytes;
}

}  // namespace kvzc

// How a list of numbers lies: between which, and how close the closest two are.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace kvzc {

struct Spread {
  std::int64_t least = 0;
  std::int64_t most = 0;
  // Between the closest two; 0: `twice` is there more than once. The largest number for one alone.
  std::uint64_t closest = std::numeric_limits<std::uint64_t>::max();
  std::int64_t twice = 0;
};

// Requires: not empty. Cost: a few nanoseconds per number where they lie as block ids mostly do, in
// order or in a range not much larger than the list; else they are sorted.
template <typename Number>
Spread spread_of(std::span<const Number> numbers) {
  Spread out{numbers.front(), numbers.front()};
  const auto look_at = [&out](std::int64_t before, std::int64_t next) {
    const std::uint64_t apart = static_cast<std::uint64_t>(next) - static_cast<std::uint64_t>(before);
    if (apart < out.closest) out.closest = apart;
    if (apart == 0) out.twice = next;
  };
  bool is_sorted = true;
  for (std::size_t i = 1; i < numbers.size(); ++i) {
    const std::int64_t number = numbers[i];
    if (number < numbers[i - 1]) is_sorted = false;
    if (is_sorted) look_at(numbers[i - 1], number);
    out.least = std::min(out.least, number);
    out.most = std::max(out.most, number);
  }
  if (is_sorted) return out;

  out.closest = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t range = static_cast<std::uint64_t>(out.most) - static_cast<std::uint64_t>(out.least);
  if (range / 64 > numbers.size()) {
    std::vector<std::int64_t> sorted(numbers.begin(), numbers.end());
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t i = 1; i < sorted.size(); ++i) look_at(sorted[i - 1], sorted[i]);
    return out;
  }
  // A bit per number that may be there: walking them is walking the list in order.
  std::vector<std::uint64_t> words(range / 64 + 1);
  for (const Number number : numbers) {
    const std::uint64_t at = static_cast<std::uint64_t>(number) - static_cast<std::uint64_t>(out.least);
    const std::uint64_t bit = std::uint64_t{1} << (at % 64);
    if ((words[at / 64] & bit) != 0) {
      out.closest = 0;
      out.twice = number;
      return out;
    }
    words[at / 64] |= bit;
  }
  std::int64_t before = out.least;
  for (std::size_t i = 0; i < words.size(); ++i) {
    for (std::uint64_t left = words[i]; left != 0; left &= left - 1) {
      const std::int64_t number =
          out.least + static_cast<std::int64_t>(i * 64) + std::countr_zero(left);
      if (number != out.least) look_at(before, number);
      before = number;
    }
  }
  return out;
}

}  // namespace kvzc

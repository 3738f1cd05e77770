#include "base/spread.h"

#include <set>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

// By sorting, and nothing else.
template <typename Number>
void expect_right(const std::vector<Number>& numbers) {
  std::vector<Number> sorted = numbers;
  std::sort(sorted.begin(), sorted.end());
  std::uint64_t closest = std::numeric_limits<std::uint64_t>::max();
  std::set<Number> twice;
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    closest = std::min(closest, static_cast<std::uint64_t>(static_cast<std::int64_t>(sorted[i])) -
                                    static_cast<std::uint64_t>(static_cast<std::int64_t>(sorted[i - 1])));
    if (sorted[i] == sorted[i - 1]) twice.insert(sorted[i]);
  }
  const Spread spread = spread_of(std::span<const Number>(numbers));
  ASSERT_EQ(spread.least, sorted.front());
  ASSERT_EQ(spread.most, sorted.back());
  ASSERT_EQ(spread.closest, closest);
  if (closest == 0) {
    ASSERT_TRUE(twice.contains(static_cast<Number>(spread.twice)));
  }
}

TEST(Spread, OfAFew) {
  expect_right<std::int64_t>({5});
  expect_right<std::int64_t>({5, 5});
  expect_right<std::int64_t>({1, 4, 9});
  expect_right<std::int64_t>({9, 4, 1});
  expect_right<std::int64_t>({3, 1, 3, 2});
  expect_right<std::int64_t>({1, 1, 0});
  expect_right<std::int64_t>({0, 63, 64, 65, 128, 127, 1});
  expect_right<std::int32_t>({-7, 70, -8, 300});
}

TEST(Spread, OfTheLargestAndTheSmallest) {
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  expect_right<std::int64_t>({kMost, kLeast});
  expect_right<std::int64_t>({kLeast, kMost});
  expect_right<std::int64_t>({kMost, kLeast, 0, kMost});
  expect_right<std::int64_t>({kMost, kMost - 1, kMost - 63, kMost - 64});
  expect_right<std::int64_t>({kLeast + 64, kLeast + 1, kLeast});
}

TEST(Spread, OfRandomLists) {
  test::Random random(7);
  KVZC_TRACE_SEED(random);
  for (int i = 0; i < 20'000; ++i) {
    // Dense ones and thin ones, some with doubles.
    const std::int64_t range = std::int64_t{1} << random.between(0, random.one_in(2) ? 8 : 50);
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(random.between(1, 40)));
    for (std::int64_t& number : numbers) number = random.between(-range, range);
    if (random.one_in(4)) std::sort(numbers.begin(), numbers.end());
    expect_right(numbers);
  }
}

}  // namespace
}  // namespace kvzc

#include "base/checked_math.h"

#include <limits>
#include <vector>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

__extension__ using Wide = __int128;
__extension__ using UnsignedWide = unsigned __int128;

const std::vector<std::uint64_t> kEdges = {0,
                                           1,
                                           2,
                                           3,
                                           7,
                                           0x7fffffff,
                                           0x80000000,
                                           0xffffffff,
                                           0x100000000,
                                           0x100000001,
                                           0x3fffffffffffffff,
                                           0x4000000000000000,
                                           0x7ffffffffffffffe,
                                           0x7fffffffffffffff,
                                           0x8000000000000000,
                                           0x8000000000000001,
                                           0xfffffffffffffffe,
                                           0xffffffffffffffff};

TEST(CheckedMath, AgreesWithWiderArithmeticOnUnsignedNumbers) {
  for (const std::uint64_t a : kEdges) {
    for (const std::uint64_t b : kEdges) {
      std::uint64_t got = 0;
      const UnsignedWide sum = UnsignedWide{a} + b;
      EXPECT_EQ(add_overflows(a, b, &got), (sum >> 64) != 0) << a << " + " << b;
      EXPECT_EQ(got, a + b);
      const UnsignedWide product = UnsignedWide{a} * b;
      EXPECT_EQ(multiply_overflows(a, b, &got), (product >> 64) != 0) << a << " * " << b;
      EXPECT_EQ(got, a * b);
    }
  }
}

TEST(CheckedMath, AgreesWithWiderArithmeticOnSignedNumbers) {
  const auto fits = [](Wide value) {
    return value >= std::numeric_limits<std::int64_t>::min() &&
           value <= std::numeric_limits<std::int64_t>::max();
  };
  for (const std::uint64_t a_bits : kEdges) {
    for (const std::uint64_t b_bits : kEdges) {
      const auto a = static_cast<std::int64_t>(a_bits);
      const auto b = static_cast<std::int64_t>(b_bits);
      std::int64_t got = 0;
      const Wide sum = Wide{a} + b;
      EXPECT_EQ(add_overflows(a, b, &got), !fits(sum)) << a << " + " << b;
      if (fits(sum)) {
        EXPECT_EQ(got, static_cast<std::int64_t>(sum));
      }
      const Wide product = Wide{a} * b;
      EXPECT_EQ(multiply_overflows(a, b, &got), !fits(product)) << a << " * " << b;
      if (fits(product)) {
        EXPECT_EQ(got, static_cast<std::int64_t>(product));
      }
    }
  }
}

TEST(CheckedMath, SaysWhetherARangeFitsWithoutWrapping) {
  for (const std::uint64_t offset : kEdges) {
    for (const std::uint64_t nbytes : kEdges) {
      for (const std::uint64_t limit : kEdges) {
        EXPECT_EQ(range_fits(offset, nbytes, limit), UnsignedWide{offset} + nbytes <= limit)
            << offset << " + " << nbytes << " in " << limit;
      }
    }
  }
}

}  // namespace
}  // namespace kvzc

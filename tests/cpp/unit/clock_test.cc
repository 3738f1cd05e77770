#include "base/clock.h"

#include <cmath>
#include <limits>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kSecond = 1'000'000'000;

TEST(Clock, NeverGoesBack) {
  std::int64_t last = now_ns();
  EXPECT_GT(last, 0);
  for (int i = 0; i < 10'000; ++i) {
    const std::int64_t now = now_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Deadline, NeverPassesWhenItIsNever) {
  for (const Deadline deadline :
       {Deadline::never(), Deadline::after_seconds(kInfinity), Deadline::after_seconds(3.0e9),
        Deadline::after_seconds(1e300), Deadline::after_seconds(std::numeric_limits<double>::max()),
        Deadline::at_ns(std::numeric_limits<std::int64_t>::max())}) {
    EXPECT_TRUE(deadline.is_never());
    EXPECT_FALSE(deadline.has_passed());
    EXPECT_EQ(deadline.left_ns(kSecond), kSecond);
    EXPECT_EQ(deadline.at(), std::numeric_limits<std::int64_t>::max());
  }
}

TEST(Deadline, IsNowForZeroAndAnythingBelow) {
  for (const double seconds :
       {0.0, -0.0, -1e-9, -1.0, -1e18, -kInfinity, std::numeric_limits<double>::lowest(),
        std::numeric_limits<double>::denorm_min()}) {
    const std::int64_t before = now_ns();
    const Deadline deadline = Deadline::after_seconds(seconds);
    EXPECT_FALSE(deadline.is_never()) << seconds;
    EXPECT_TRUE(deadline.has_passed()) << seconds;
    EXPECT_EQ(deadline.left_ns(kSecond), 0) << seconds;
    EXPECT_GE(deadline.at(), before) << seconds;
    EXPECT_LE(deadline.at(), now_ns()) << seconds;
  }
}

TEST(Deadline, IsThatManySecondsFromNow) {
  for (const double seconds : {1e-3, 0.5, 2.0, 30.0, 86400.0, 2.9e9}) {
    const std::int64_t before = now_ns();
    const Deadline deadline = Deadline::after_seconds(seconds);
    const std::int64_t after = now_ns();
    const auto length = static_cast<std::int64_t>(seconds * 1e9);
    EXPECT_GE(deadline.at(), before + length) << seconds;
    EXPECT_LE(deadline.at(), after + length) << seconds;
    EXPECT_FALSE(deadline.is_never()) << seconds;
  }
}

TEST(Deadline, GivesNoMoreThanTheLimitAndNoLessThanNothing) {
  const Deadline later = Deadline::after_seconds(100);
  EXPECT_FALSE(later.has_passed());
  EXPECT_EQ(later.left_ns(kSecond), kSecond);
  const std::int64_t left = later.left_ns(std::numeric_limits<std::int64_t>::max());
  EXPECT_GT(left, 90 * kSecond);
  EXPECT_LE(left, 100 * kSecond);
  EXPECT_EQ(Deadline::at_ns(now_ns() - 1).left_ns(kSecond), 0);
  EXPECT_EQ(Deadline::at_ns(1).left_ns(kSecond), 0);
  EXPECT_TRUE(Deadline::at_ns(1).has_passed());
}

// No caller means anything by it; what counts is that it is one or the other, and always the same.
TEST(Deadline, TakesNotANumberForNeverOrForNow) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Deadline deadline = Deadline::after_seconds(nan);
  EXPECT_NE(deadline.is_never(), deadline.has_passed());
  EXPECT_EQ(Deadline::after_seconds(-nan).is_never(), deadline.is_never());
}

}  // namespace
}  // namespace kvzc

// How long it pays to look before one sleeps.
#include "base/patience.h"

#include <gtest/gtest.h>

namespace kvzc {
namespace {

TEST(PatienceTest, ItGrowsToTwiceWhatItTakesAndNoFurther) {
  Patience patience(50, 2000);
  EXPECT_EQ(patience.ns(), 50);
  for (int i = 0; i < 20; ++i) patience.came_after(400);
  EXPECT_NEAR(static_cast<double>(patience.ns()), 800, 2);
  for (int i = 0; i < 20; ++i) patience.came_after(1000);
  EXPECT_NEAR(static_cast<double>(patience.ns()), 2000, 2);
}

TEST(PatienceTest, WhatTakesLongIsNotLookedFor) {
  Patience patience(50, 2000);
  for (int i = 0; i < 20; ++i) patience.came_after(400);
  for (int i = 0; i < 20; ++i) patience.came_after(1'000'000);
  EXPECT_NEAR(static_cast<double>(patience.ns()), 50, 2);
}

TEST(PatienceTest, LooksInVainWearItOutButNotBelowTheLeast) {
  Patience patience(50, 2000);
  for (int i = 0; i < 20; ++i) patience.came_after(1000);
  patience.was_in_vain();
  EXPECT_NEAR(static_cast<double>(patience.ns()), 1000, 2);
  for (int i = 0; i < 20; ++i) patience.was_in_vain();
  EXPECT_EQ(patience.ns(), 50);
}

}  // namespace
}  // namespace kvzc

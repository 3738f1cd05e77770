#include "core/storage_table.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvzc {
namespace {

class StorageTableTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kNbytes = 64;

  TensorSpec spec_of(std::uint64_t at, std::uint64_t nbytes = kNbytes) {
    TensorSpec spec;
    spec.data = spec.storage_data = bytes_.data() + at;
    spec.storage_nbytes = nbytes;
    return spec;
  }
  std::shared_ptr<LocalStorage> find(std::uint64_t at, std::uint64_t nbytes = kNbytes) {
    return table_.find(bytes_.data() + at, nbytes);
  }

  std::vector<std::byte> bytes_ = std::vector<std::byte>(1 << 20);
  StorageTable table_{std::make_shared<SharedAllocator>()};
};

TEST_F(StorageTableTest, FindsWhatHoldsAllOfARange) {
  const auto storage = table_.acquire(spec_of(128));
  for (int again = 0; again < 2; ++again) {  // The second time it is known where.
    EXPECT_EQ(find(128), storage);
    EXPECT_EQ(find(130, 62), storage);
    EXPECT_EQ(find(130, 63), nullptr);
    EXPECT_EQ(find(128, kNbytes + 1), nullptr);
    EXPECT_EQ(find(127), nullptr);
    EXPECT_EQ(find(192), nullptr);
  }
}

TEST_F(StorageTableTest, OneOfManyIsFoundUntilItIsReleased) {
  constexpr std::uint64_t kMany = (1 << 20) / kNbytes;
  std::vector<std::shared_ptr<LocalStorage>> all;
  for (std::uint64_t i = 0; i < kMany; ++i) all.push_back(table_.acquire(spec_of(i * kNbytes)));
  EXPECT_EQ(table_.size(), kMany);
  for (std::uint64_t i = 0; i < kMany; ++i) ASSERT_EQ(find(i * kNbytes), all[i]);
  for (std::uint64_t i = 0; i < kMany; i += 2) {
    ASSERT_EQ(find(i * kNbytes), all[i]);
    ASSERT_TRUE(table_.release(all[i]));
    all[i] = nullptr;
    ASSERT_EQ(find(i * kNbytes), nullptr);
  }
  for (std::uint64_t i = 0; i < kMany; ++i) ASSERT_EQ(find(i * kNbytes), all[i]);
}

TEST_F(StorageTableTest, AStorageStaysUntilItsLastRegistrationGoes) {
  const auto storage = table_.acquire(spec_of(0));
  EXPECT_EQ(table_.acquire(spec_of(0)), storage);
  EXPECT_FALSE(table_.release(storage));
  EXPECT_EQ(find(0), storage);
  EXPECT_TRUE(table_.release(storage));
  EXPECT_FALSE(table_.release(storage));
  EXPECT_EQ(find(0), nullptr);
}

TEST_F(StorageTableTest, ALargerOneAtTheSameAddressIsAnother) {
  const auto small = table_.acquire(spec_of(0));
  EXPECT_EQ(find(0), small);
  const auto large = table_.acquire(spec_of(0, 2 * kNbytes));
  EXPECT_NE(large, small);
  EXPECT_EQ(find(0, 2 * kNbytes), large);
  EXPECT_TRUE(table_.release(large));
  EXPECT_EQ(find(0), small);
}

}  // namespace
}  // namespace kvzc

#include "kvzc/memory.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "base/shared_memory.h"
#include "unit/unit_support.h"

namespace kvzc {
namespace {

std::shared_ptr<SharedAllocation> must_allocate(SharedAllocator& allocator, std::uint64_t nbytes) {
  Result<std::shared_ptr<SharedAllocation>> out = allocator.allocate(nbytes);
  EXPECT_TRUE(out.is_ok()) << out.status().to_string();
  return out.is_ok() ? out.take() : nullptr;
}

TEST(SharedAllocator, FindsWhatLiesInsideAndNothingElse) {
  constexpr std::uint64_t kBytes = 10'000;
  SharedAllocator allocator;
  const auto memory = must_allocate(allocator, kBytes);
  std::byte* const data = memory->data();
  EXPECT_EQ(memory->nbytes(), kBytes);
  EXPECT_EQ(memory->memory().nbytes(), kBytes);
  EXPECT_EQ(allocator.find(data, kBytes), memory);
  EXPECT_EQ(allocator.find(data, 1), memory);
  EXPECT_EQ(allocator.find(data + 5000, 5000), memory);
  EXPECT_EQ(allocator.find(data + kBytes - 1, 1), memory);
  EXPECT_EQ(allocator.find(data + 1, kBytes), nullptr);
  EXPECT_EQ(allocator.find(data, kBytes + 1), nullptr);
  EXPECT_EQ(allocator.find(data - 1, 1), nullptr);
  EXPECT_EQ(allocator.find(data - 1, kBytes), nullptr);
  EXPECT_EQ(allocator.find(data + kBytes, 1), nullptr);
  EXPECT_EQ(allocator.find(data + 1, std::numeric_limits<std::uint64_t>::max()), nullptr);
  EXPECT_EQ(allocator.find(data + kBytes, std::numeric_limits<std::uint64_t>::max()), nullptr);
  EXPECT_EQ(allocator.find(nullptr, 1), nullptr);
  int on_stack = 0;
  EXPECT_EQ(allocator.find(reinterpret_cast<std::byte*>(&on_stack), sizeof on_stack), nullptr);
}

TEST(SharedAllocator, FindsNothingInAnEmptyOne) {
  SharedAllocator allocator;
  SharedAllocator other;
  const auto memory = must_allocate(other, 100);
  EXPECT_EQ(allocator.find(memory->data(), 1), nullptr);
}

TEST(SharedAllocator, TellsNeighboursApart) {
  SharedAllocator allocator;
  std::vector<std::shared_ptr<SharedAllocation>> all;
  for (std::uint64_t i = 1; i <= 50; ++i) all.push_back(must_allocate(allocator, i * 4096));
  for (const auto& one : all) {
    EXPECT_EQ(allocator.find(one->data(), one->nbytes()), one);
    EXPECT_EQ(allocator.find(one->data() + one->nbytes() - 1, 1), one);
    // Two neighbours are not one piece, even where they touch.
    EXPECT_EQ(allocator.find(one->data() + one->nbytes() - 1, 2), nullptr);
  }
}

TEST(SharedAllocator, ForgetsWhatWasFreed) {
  SharedAllocator allocator;
  auto memory = must_allocate(allocator, 10'000);
  const auto kept = must_allocate(allocator, 10'000);
  const std::byte* const data = memory->data();
  memory.reset();
  EXPECT_EQ(allocator.find(data, 1), nullptr);
  EXPECT_EQ(allocator.find(kept->data(), 10'000), kept);
}

TEST(SharedAllocator, KeepsWhatWasFoundAlive) {
  SharedAllocator allocator;
  auto memory = must_allocate(allocator, 10'000);
  std::byte* const data = memory->data();
  auto found = allocator.find(data + 9'999, 1);
  memory.reset();
  data[9'999] = std::byte{1};
  EXPECT_EQ(allocator.find(data, 10'000), found);
  found.reset();
  EXPECT_EQ(allocator.find(data, 10'000), nullptr);
}

TEST(SharedAllocator, FindsNewMemoryWhereOldMemoryWas) {
  SharedAllocator allocator;
  test::Random random(12);
  KVZC_TRACE_SEED(random);
  std::vector<std::shared_ptr<SharedAllocation>> alive;
  for (int round = 0; round < 2000; ++round) {
    if (!alive.empty() && random.one_in(2)) {
      const auto at =
          alive.begin() + random.between(0, static_cast<std::int64_t>(alive.size()) - 1);
      alive.erase(at);
    } else {
      alive.push_back(
          must_allocate(allocator, static_cast<std::uint64_t>(random.between(1, 40'000))));
    }
    if (alive.empty()) continue;
    const auto& any = random.pick(alive);
    const auto last = static_cast<std::int64_t>(any->nbytes()) - 1;
    ASSERT_EQ(allocator.find(any->data() + random.between(0, last), 1), any);
    ASSERT_EQ(allocator.find(any->data(), any->nbytes()), any);
    ASSERT_EQ(allocator.find(any->data(), any->nbytes() + 1), nullptr);
  }
}

TEST(SharedAllocator, SaysWhyItCouldNotAllocateAndGoesOn) {
  SharedAllocator allocator;
  EXPECT_EQ(allocator.allocate(0).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(allocator.allocate(std::numeric_limits<std::uint64_t>::max()).status().code(),
            Code::kLimitExceeded);
  EXPECT_TRUE(allocator.allocate(1).is_ok());
}

TEST(SharedAllocator, MayBeUsedFromManyThreads) {
  SharedAllocator allocator;
  const auto shared = must_allocate(allocator, 4096);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        auto own = allocator.allocate(8192);
        if (!own.is_ok() || allocator.find((*own)->data() + 8191, 1) != *own) ++wrong;
        if (allocator.find(shared->data(), 4096) != shared) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(LocalView, IndexesItsViewAndKeepsItsMemory) {
  LocalView local;
  local.memory = std::make_shared<RegionMemory>();
  TensorView tensor;
  tensor.axes = {{10, 4, nullptr}, {4, 1, nullptr}};
  local.view.tensors = {tensor};
  const std::vector<Index> row = {std::int64_t{-1}};
  const Result<LocalView> got = local.index(row);
  ASSERT_TRUE(got.is_ok());
  EXPECT_EQ(got->memory, local.memory);
  EXPECT_EQ(got->view.tensors[0].offset, 36);
  const std::vector<Index> beyond = {std::int64_t{10}};
  EXPECT_EQ(local.index(beyond).status().code(), Code::kOutOfRange);
}

}  // namespace
}  // namespace kvzc

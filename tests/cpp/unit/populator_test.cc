#include "transport/shm/populator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "unit/unit_support.h"

namespace kvzc::shm {
namespace {

constexpr std::uint64_t kBytes = 16u << 20;

// A second mapping of memory that exists: none of its pages are in this process's tables.
std::shared_ptr<MappedMemory> map_afresh(const SharedMemory& memory) {
  SharedMemory again =
      SharedMemory::map(OwnedFd(dup(memory.fd())), kBytes, MapAccess::kReadWrite).take();
  return std::make_shared<MappedMemory>(std::move(again));
}

long faults_of_this_thread() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt;
}

// Gives how many faults it takes to write into each page.
long touch(const MappedMemory& memory) {
  const long before = faults_of_this_thread();
  for (std::uint64_t at = 0; at < kBytes; at += 4096) memory.data()[at] = std::byte{1};
  return faults_of_this_thread() - before;
}

bool kernel_can_populate() {
  constexpr int kPopulateWrite = 23;  // Linux 5.14.
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool can = madvise(page, 4096, kPopulateWrite) == 0;
  munmap(page, 4096);
  return can;
}

// Waits until all of it is in this process's page tables, for at most ten seconds.
bool is_populated(const MappedMemory& memory) {
  constexpr std::uint64_t kPages = kBytes / 4096;
  const OwnedFd map(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  std::vector<std::uint64_t> entries(kPages);
  for (int i = 0; i < 1000; ++i) {
    const auto first = reinterpret_cast<std::uintptr_t>(memory.data()) / 4096;
    const ssize_t got = pread(map.get(), entries.data(), kPages * 8, static_cast<off_t>(first * 8));
    const auto is_present = [](std::uint64_t entry) { return (entry >> 63) != 0; };
    if (got == static_cast<ssize_t>(kPages * 8) &&
        std::all_of(entries.begin(), entries.end(), is_present)) {
      return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

TEST(Populator, TheFirstWriteIntoMappedMemoryFaultsNoMore) {
  const SharedMemory memory = SharedMemory::create("kvzc-test", kBytes).take();
  // So it is without: a fault for each page, or for each few.
  EXPECT_GT(touch(*map_afresh(memory)), 100);
  const std::shared_ptr<MappedMemory> mapped = map_afresh(memory);
  Populator populator;
  populator.add(mapped);
  if (!kernel_can_populate()) {
    populator.stop();  // And nothing bad has happened.
    touch(*mapped);
    return;
  }
  ASSERT_TRUE(is_populated(*mapped));
  if (!KVZC_SANITIZED) {  // A sanitizer's own pages fault too.
    EXPECT_LT(touch(*mapped), 20);
  }
}

TEST(Populator, MemoryThatGoesIsLetGo) {
  const SharedMemory memory = SharedMemory::create("kvzc-test", kBytes).take();
  Populator populator;
  for (int i = 0; i < 50; ++i) {
    std::shared_ptr<MappedMemory> mapped = map_afresh(memory);
    const std::weak_ptr<MappedMemory> seen = mapped;
    populator.add(mapped);
    mapped.reset();
    for (int looks = 0; !seen.expired() && looks < 10'000; ++looks) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(seen.expired());
  }
}

TEST(Populator, StopsInTheMiddleAndTakesNothingMore) {
  const SharedMemory memory = SharedMemory::create("kvzc-test", kBytes).take();
  std::vector<std::shared_ptr<MappedMemory>> many;
  Populator populator;
  for (int i = 0; i < 20; ++i) populator.add(many.emplace_back(map_afresh(memory)));
  populator.stop();
  populator.add(many.front());
  populator.stop();
  for (const auto& each : many) EXPECT_EQ(each.use_count(), 1);
}

}  // namespace
}  // namespace kvzc::shm

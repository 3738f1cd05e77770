// What is left to take, read from files of our own making.
#include "base/memory_limit.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

constexpr std::uint64_t kMib = std::uint64_t{1} << 20;

// A machine with 8 GiB available, 2 of which are swap.
class MemoryLimitTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvzc-limit-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    write("/proc/meminfo",
          "MemTotal: 99999999 kB\nMemAvailable: 6291456 kB\nSwapFree: 2097152 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  MemoryLimit read() { return available_memory(root_); }

 private:
  std::string root_;
};

TEST_F(MemoryLimitTest, OfAMachineIsWhatIsAvailableWithTheSwap) {
  EXPECT_EQ(read().bytes, 8192 * kMib);
  EXPECT_EQ(read().source, "the machine's available memory");
}

TEST_F(MemoryLimitTest, OfAContainerIsWhatItsGroupLeavesAndSaysSo) {
  write("/proc/self/cgroup", "0::/\n");
  write("/sys/fs/cgroup/memory.max", std::to_string(1024 * kMib));
  write("/sys/fs/cgroup/memory.current", std::to_string(24 * kMib));
  EXPECT_EQ(read().bytes, 1000 * kMib);
  EXPECT_EQ(read().source, "the container's memory limit (memory.max)");
}

TEST_F(MemoryLimitTest, IsThatOfTheNarrowestGroupAroundTheProcess) {
  write("/proc/self/cgroup", "1:name=systemd:/elsewhere\n0::/pod/server\n");
  write("/sys/fs/cgroup/pod/server/memory.max", "max\n");
  write("/sys/fs/cgroup/pod/memory.max", std::to_string(512 * kMib));
  write("/sys/fs/cgroup/pod/memory.current", std::to_string(500 * kMib));
  write("/sys/fs/cgroup/memory.max", std::to_string(2048 * kMib));
  EXPECT_EQ(read().bytes, 12 * kMib);
  // More is in use than is allowed, as when the limit was lowered.
  write("/sys/fs/cgroup/pod/memory.current", std::to_string(600 * kMib));
  EXPECT_EQ(read().bytes, 0u);
}

TEST_F(MemoryLimitTest, IsReadFromTheFirstVersionOfGroupsToo) {
  write("/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n");
  write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", std::to_string(64 * kMib));
  write("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", std::to_string(4 * kMib));
  EXPECT_EQ(read().bytes, 60 * kMib);
  EXPECT_EQ(read().source, "the container's memory limit (memory.limit_in_bytes)");
}

TEST_F(MemoryLimitTest, OfAContainerThatMayTakeMoreThanThereIsIsTheMachines) {
  write("/proc/self/cgroup", "0::/\n");
  write("/sys/fs/cgroup/memory.max", std::to_string(100 * 1024 * kMib));
  write("/sys/fs/cgroup/memory.current", "0");
  EXPECT_EQ(read().bytes, 8192 * kMib);
  EXPECT_EQ(read().source, "the machine's available memory");
}

}  // namespace
}  // namespace kvzc

// Registrations that are small, that fail and that stay: no byte is lost, nothing is left behind,
// and the error says what to do.

#include <errno.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "rdma/lies_test.h"

namespace kvzc::lies {
namespace {

constexpr std::uint64_t kMib = 1 << 20;

// --- REG-05, REG-06, REG-07: a device takes no more than so much at once ---

class SmallRegionsTest : public LiesTest {
 protected:
  static constexpr std::uint64_t kBytes = 4 * kMib;

  void SetUp() override {
    LiesTest::SetUp();
    device("owner:rxe0").max_mr_size = kMib;
    // The bounds of the two sides differ, and here they are not those of pages.
    device("writer:rxe0").max_mr_size = kMib + 4321;
  }

  // Compares after each, so that a failure names the range.
  void move_ranges(Direction direction) {
    const OwnedMemory memory = own(kBytes, 1);
    std::vector<std::byte> source(kBytes);
    fill(source.data(), kBytes, 2);
    const RemoteView remote = open_handle(memory.handle_text());
    const LocalView local = view_of(*writer_, source.data(), kBytes);
    std::byte* const target = direction == Direction::kPut ? memory.data() : source.data();
    const std::byte* const origin = direction == Direction::kPut ? source.data() : memory.data();
    std::vector<std::byte> expected(target, target + kBytes);
    const auto move_one = [&](std::uint64_t local_at, std::uint64_t remote_at, std::uint64_t n) {
      const auto end = [n](std::uint64_t at) { return static_cast<std::int64_t>(at + n); };
      const LocalView from = slice(local, static_cast<std::int64_t>(local_at), end(local_at));
      const RemoteView to = slice(remote, static_cast<std::int64_t>(remote_at), end(remote_at));
      const Status moved = move(*writer_, direction, from, to);
      ASSERT_TRUE(moved.is_ok()) << moved.to_string();
      const bool is_put = direction == Direction::kPut;
      std::memcpy(expected.data() + (is_put ? remote_at : local_at),
                  origin + (is_put ? local_at : remote_at), n);
      ASSERT_EQ(std::memcmp(expected.data(), target, kBytes), 0)
          << n << " bytes, here at " << local_at << ", there at " << remote_at;
    };
    move_one(100, 3 * kMib, 64);
    for (const std::uint64_t line : {kMib, 2 * kMib, 3 * kMib}) {
      move_one(line + 5000, line - 32, 64);
      move_one(line / 2, line - 1, 2);
      move_one(line, line - 64, 64);
      move_one(line + 64, line, 64);
    }
    // Across the bounds of this side, and of both at different bytes of it.
    move_one(kMib + 4321 - 10, 77, 30);
    move_one(kMib + 4321 - 700, kMib - 300, 1500);
    move_one(0, kMib - 5, 2 * kMib + 10);
    move_one(3, 0, kBytes - 3);
    move_one(0, 0, kBytes);
    EXPECT_EQ(device("owner:rxe0").held, 1 + 4);
    EXPECT_EQ(device("writer:rxe0").held, 1 + 4);
  }

  // As a cache's blocks lie: scattered on one side, dense on the other, none dividing the limit.
  void move_blocks(Direction direction, std::int64_t block_bytes, bool is_scattered_here) {
    const std::int64_t count = static_cast<std::int64_t>(kBytes) / block_bytes;
    const std::uint64_t used = static_cast<std::uint64_t>(count * block_bytes);
    std::vector<std::byte> theirs(used), ours(used);
    fill(theirs.data(), used, 3);
    fill(ours.data(), used, 4);
    const TensorSpec spec = rows_of(theirs.data(), count, block_bytes);
    Region region = owner_->register_memory({&spec, 1}).take();
    const RemoteView remote = handle_of(*region.handle());
    const LocalView local =
        writer_->find_or_borrow(rows_of(ours.data(), count, block_bytes)).take();
    std::vector<std::int64_t> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::rotate(order.begin(), order.begin() + count / 3, order.end());
    std::reverse(order.begin(), order.begin() + count / 2);
    const auto n = static_cast<std::size_t>(block_bytes);
    const std::vector<std::byte> theirs_before = theirs, ours_before = ours;
    const Status moved = move(*writer_, direction, is_scattered_here ? pick(local, order) : local,
                              is_scattered_here ? remote : pick(remote, order));
    ASSERT_TRUE(moved.is_ok()) << moved.to_string();
    for (std::int64_t i = 0; i < count; ++i) {
      const auto dense = static_cast<std::size_t>(i * block_bytes);
      const auto picked =
          static_cast<std::size_t>(order[static_cast<std::size_t>(i)] * block_bytes);
      const std::size_t here = is_scattered_here ? picked : dense;
      const std::size_t there = is_scattered_here ? dense : picked;
      const bool is_same = direction == Direction::kPut
                               ? std::memcmp(&theirs[there], &ours_before[here], n) == 0
                               : std::memcmp(&ours[here], &theirs_before[there], n) == 0;
      ASSERT_TRUE(is_same) << "block " << i << " of " << count;
    }
    // And its origin is as it was.
    EXPECT_EQ(direction == Direction::kPut ? ours : theirs,
              direction == Direction::kPut ? ours_before : theirs_before);
    EXPECT_TRUE(region.close(in_seconds(20)).is_ok());
  }
};

TEST_F(SmallRegionsTest, PutsReachEveryByteOfALargeRegion) {
  open(kOneRail);
  move_ranges(Direction::kPut);
}

TEST_F(SmallRegionsTest, GetsReachEveryByteOfALargeRegion) {
  open(kOneRail);
  move_ranges(Direction::kGet);
}

TEST_F(SmallRegionsTest, BlocksThatDoNotDivideTheLimitArriveWhole) {
  open(kOneRail);
  for (const Direction direction : {Direction::kPut, Direction::kGet}) {
    for (const bool is_scattered_here : {false, true}) {
      move_blocks(direction, 100'001, is_scattered_here);
      move_blocks(direction, 3'000, is_scattered_here);
    }
  }
}

TEST_F(SmallRegionsTest, AreCutAlsoWhereOneRailTakesMoreThanTheOther) {
  device("writer:rxe0").max_mr_size = 0;
  device("writer:rxe1").max_mr_size = 2 * kMib;
  open(kTwoRails, [](EngineOptions& options) {
    options.rdma.least_striped_bytes = 4096;
    options.rdma.most_request_bytes = 65536;
  });
  for (const Direction direction : {Direction::kPut, Direction::kGet}) {
    move_blocks(direction, 100'001, true);
    move_blocks(direction, 100'001, false);
  }
}

// --- REG-09: one device takes the memory, the next does not ---

class ShortageTest : public LiesTest {
 protected:
  static constexpr std::uint64_t kBytes = kMib;

  void SetUp() override {
    LiesTest::SetUp();
    open(kTwoRails);
    first_ = own(4096);
    const RemoteView target = open_handle(first_.handle_text());
    connect(target);
    source_.resize(kBytes);
    fill(source_.data(), kBytes, 5);
    held_before_ = all_held();
  }

  void expect_nothing_left() { EXPECT_EQ(all_held(), held_before_); }

  // Memory is registered when it is registered with the engine, and once more for a grant that allows
  // less than all, when the first peer comes: then the devices may be short.
  std::string text_of_put_grant(const OwnedMemory& memory) {
    return text_of(owner_->grant(memory.region.view().take(), Access::kPut).take());
  }

  OwnedMemory first_;
  std::vector<std::byte> source_;
  std::int64_t held_before_ = 0;
};

TEST_F(ShortageTest, WhenMemoryIsRegisteredIsSaidAtOnceAndLeavesNothing) {
  std::vector<std::byte> bytes(kBytes);
  const TensorSpec spec = rows_of(bytes.data(), 1, kBytes);
  device("owner:rxe1").refuses_memory = ENOMEM;
  const Status failed = owner_->register_memory({&spec, 1}).status();
  EXPECT_EQ(failed.code(), Code::kLimitExceeded) << failed.to_string();
  EXPECT_HAS(failed.text(), "rxe1");
  EXPECT_HAS(failed.text(), "1048576 bytes");
  EXPECT_EQ(owner_->stats().storages, 1u);
  expect_nothing_left();
  device("owner:rxe1").refuses_memory = 0;
  Result<Region> region = owner_->register_memory({&spec, 1});
  ASSERT_TRUE(region.is_ok()) << region.status().to_string();
  EXPECT_TRUE(region->close(in_seconds(20)).is_ok());
}

TEST_F(ShortageTest, OnTheSecondDeviceOfTheOwnerLeavesNothingOnTheFirst) {
  OwnedMemory memory = own(kBytes);
  const std::string text = text_of_put_grant(memory);
  const LocalView source = view_of(*writer_, source_.data(), kBytes);
  device("owner:rxe1").refuses_memory = ENOMEM;
  const Status failed = put(source, open_handle(text));
  EXPECT_EQ(failed.code(), Code::kLimitExceeded) << failed.to_string();
  EXPECT_HAS(failed.text(), "rxe1");
  EXPECT_HAS(failed.text(), "1048576 bytes");
  EXPECT_HAS(failed.text(), "free memory region");
  EXPECT_TRUE(memory.region.close(in_seconds(20)).is_ok());
  memory = {};
  expect_nothing_left();
}

TEST_F(ShortageTest, OfTheOwnerPassesAndTheHandleWorks) {
  OwnedMemory memory = own(kBytes);
  const RemoteView target = open_handle(text_of_put_grant(memory));
  {
    const LocalView source = view_of(*writer_, source_.data(), kBytes);
    for (int i = 0; i < 2; ++i) {
      device("owner:rxe1").refuses_memory = ENOMEM;
      EXPECT_FALSE(put(source, target).is_ok());
    }
    device("owner:rxe1").refuses_memory = 0;
    const Status passed = put(source, target);
    EXPECT_TRUE(passed.is_ok()) << passed.to_string();
    EXPECT_EQ(first_difference(memory.data(), kBytes, 5), -1);
    // For others who hold it as well, and another grant of the same memory.
    const Grant grant = owner_->grant(memory.region.view().take(), Access::kBoth).take();
    EXPECT_TRUE(put(source, open_handle(text_of(grant))).is_ok());
  }
  EXPECT_TRUE(memory.region.close(in_seconds(20)).is_ok());
  memory = {};
  expect_nothing_left();
}

TEST_F(ShortageTest, OnTheSecondDeviceOfTheWriterPassesToo) {
  OwnedMemory memory = own(kBytes);
  const RemoteView target = open_handle(memory.handle_text());
  connect(target);
  const std::int64_t held = device("writer:rxe0").held;
  {
    const LocalView source = view_of(*writer_, source_.data(), kBytes);
    device("writer:rxe1").refuses_memory = ENOMEM;
    const Status failed = put(source, target);
    EXPECT_EQ(failed.code(), Code::kLimitExceeded) << failed.to_string();
    EXPECT_HAS(failed.text(), "rxe1");
    EXPECT_HAS(failed.text(), "1048576 bytes");
    EXPECT_EQ(first_difference(memory.data(), kBytes, 0), -1) << "a byte moved";
    device("writer:rxe1").refuses_memory = 0;
    EXPECT_TRUE(put(source, target).is_ok());
    EXPECT_EQ(first_difference(memory.data(), kBytes, 5), -1);
  }
  EXPECT_EQ(device("writer:rxe0").held, held) << "a borrowed source stays registered";
  EXPECT_TRUE(memory.region.close(in_seconds(20)).is_ok());
  memory = {};
  expect_nothing_left();
}

TEST_F(ShortageTest, InTheMiddleOfManyPartsLeavesNoneOfThem) {
  close();
  device("owner:rxe1").max_mr_size = kMib / 4;
  open(kTwoRails);
  first_ = own(4096);
  connect(open_handle(first_.handle_text()));
  held_before_ = all_held();
  OwnedMemory memory = own(kBytes);
  const std::int64_t held_second = device("owner:rxe1").held;
  device("owner:rxe1").takes_memory = 2;
  device("owner:rxe1").refuses_memory = ENOMEM;
  const LocalView source = view_of(*writer_, source_.data(), kBytes);
  EXPECT_FALSE(put(source, open_handle(text_of_put_grant(memory))).is_ok());
  EXPECT_EQ(device("owner:rxe1").held, held_second);
  device("owner:rxe1").refuses_memory = 0;
  EXPECT_TRUE(memory.region.close(in_seconds(20)).is_ok());
  memory = {};
  expect_nothing_left();
}

// What cannot be pinned at all is said as that, with what to do instead.
TEST_F(ShortageTest, IsNotWhatMemoryIsThatCannotBePinned) {
  const OwnedMemory memory = own(kBytes);
  const RemoteView target = open_handle(memory.handle_text());
  connect(target);
  device("writer:rxe1").refuses_memory = EFAULT;
  const Status failed = put(view_of(*writer_, source_.data(), kBytes), target);
  EXPECT_EQ(failed.code(), Code::kTransportUnavailable) << failed.to_string();
  EXPECT_HAS(failed.text(), "rxe1");
  EXPECT_HAS(failed.text(), "kvzc.empty()");
}

// --- LIFE-04: a device does not let go ---

TEST_F(ShortageTest, OfLuckInDeregisteringIsNoLeak) {
  OwnedMemory memory = own(kBytes);
  ASSERT_TRUE(put(view_of(*writer_, source_.data(), kBytes), open_handle(memory.handle_text()))
                  .is_ok());
  device("owner:rxe0").keeps_memory = 1;
  EXPECT_TRUE(memory.region.close(in_seconds(20)).is_ok());
  memory = {};
  expect_nothing_left();
}

// --- RLIMIT_MEMLOCK ---

void drop_the_right_to_lock_memory() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  ASSERT_EQ(syscall(SYS_capget, &header, data), 0);
  data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
  ASSERT_EQ(syscall(SYS_capset, &header, data), 0);
}

void allow_to_lock(rlim_t nbytes) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  limit.rlim_cur = nbytes;
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
}

// A process of its own, as the limit and what counts against it are of processes.
class LockedMemoryTest : public LiesTest {
 protected:
  void in_a_child(const std::function<void()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      drop_the_right_to_lock_memory();
      body();
      close();
      fflush(stdout);
      _exit(HasFailure() ? 1 : 0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child failed: " << status;
  }
};

TEST_F(LockedMemoryTest, ThatIsTooLittleIsSaidWithItsLimitAndHowToRaiseIt) {
  in_a_child([this] {
    open(kOneRail);
    const OwnedMemory memory = own(4 * kMib);
    const RemoteView target = open_handle(memory.handle_text());
    connect(target);
    std::vector<std::byte> source(4 * kMib);
    fill(source.data(), source.size(), 6);
    allow_to_lock(kMib);
    const LocalView view = view_of(*writer_, source.data(), source.size());
    const Status failed = put(view, target);
    EXPECT_EQ(failed.code(), Code::kLimitExceeded) << failed.to_string();
    EXPECT_HAS(failed.text(), "rxe0");
    EXPECT_HAS(failed.text(), "4194304 bytes");
    EXPECT_HAS(failed.text(), "RLIMIT_MEMLOCK allows 1048576 bytes");
    EXPECT_HAS(failed.text(), "ulimit -l");
    allow_to_lock(RLIM_INFINITY);
    EXPECT_TRUE(put(view, target).is_ok());
    EXPECT_EQ(first_difference(memory.data(), memory.nbytes(), 6), -1);
  });
}

TEST_F(LockedMemoryTest, ThatIsTooLittleAtTheOwnerIsSaidToTheWriter) {
  in_a_child([this] {
    open(kOneRail);
    const OwnedMemory small = own(4096);
    connect(open_handle(small.handle_text()));
    const OwnedMemory memory = own(4 * kMib);
    std::vector<std::byte> source(4 * kMib);
    allow_to_lock(kMib);
    const Status failed =
        put(view_of(*writer_, source.data(), source.size()), open_handle(memory.handle_text()));
    EXPECT_EQ(failed.code(), Code::kLimitExceeded) << failed.to_string();
    EXPECT_HAS(failed.text(), "rxe0");
    EXPECT_HAS(failed.text(), "RLIMIT_MEMLOCK allows 1048576 bytes");
  });
}

// --- LIFE-09, LIFE-10: fork ---

class ForkTest : public LiesTest {
 protected:
  static constexpr std::size_t kPage = 4096;

  // Two pages of private memory, of which 2 KiB in the middle of the first move.
  struct Pages {
    std::byte* data = static_cast<std::byte*>(mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE,
                                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ~Pages() { munmap(data, 2 * kPage); }
    std::byte* middle() const { return data + 1024; }
  };

  // Its memory is private on both sides.
  void check(const std::function<void(Pages& theirs, Pages& ours)>& fork_something) {
    open(kOneRail);
    Pages theirs, ours;
    for (Pages* each : {&theirs, &ours}) fill(each->data, 2 * kPage, 7);
    const auto spec_of = [](Pages& pages) {
      TensorSpec spec;
      spec.shape = {2048};
      spec.strides_bytes = {1};
      spec.data = spec.storage_data = pages.middle();
      spec.storage_nbytes = 2048;
      return spec;
    };
    const TensorSpec target_spec = spec_of(theirs), source_spec = spec_of(ours);
    Region region = owner_->register_memory({&target_spec, 1}).take();
    Region source = writer_->register_memory({&source_spec, 1}).take();
    const RemoteView remote = handle_of(*region.handle());
    fill(ours.middle(), 2048, 8);
    ASSERT_TRUE(put(source.view().take(), remote).is_ok());
    ASSERT_EQ(first_difference(theirs.middle(), 2048, 8), -1);

    fork_something(theirs, ours);

    // Both sides write first: whoever has a page of its own now is the one that wrote.
    ours.data[0] = theirs.data[0] = std::byte{1};
    fill(theirs.middle(), 2048, 9);
    fill(ours.middle(), 2048, 10);
    ASSERT_TRUE(put(source.view().take(), remote).is_ok());
    EXPECT_EQ(first_difference(theirs.middle(), 2048, 10), -1);
    fill(theirs.middle(), 2048, 11);
    ASSERT_TRUE(get(source.view().take(), remote).is_ok());
    EXPECT_EQ(first_difference(ours.middle(), 2048, 11), -1);
    EXPECT_TRUE(region.close(in_seconds(20)).is_ok());
    EXPECT_TRUE(source.close(in_seconds(20)).is_ok());
  }
};

TEST_F(ForkTest, NewDataArrivesAndTheChildKeepsItsNeighbours) {
  check([](Pages& theirs, Pages& ours) {
    const pid_t child = fork();
    if (child == 0) {
      for (Pages* each : {&theirs, &ours}) {
        std::memset(each->data, 0x55, 1024);
        std::memset(each->middle() + 2048, 0x55, 2 * kPage - 3072);
      }
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child died: " << status;
    for (Pages* each : {&theirs, &ours}) {
      for (std::size_t i = 0; i < 1024; ++i) ASSERT_EQ(each->data[i], pattern(i, 7));
    }
  });
}

TEST_F(ForkTest, NewDataArrivesWhileTheChildLives) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  pid_t child = -1;
  check([&](Pages&, Pages&) {
    child = fork();
    if (child != 0) return;
    ::close(pipe_fds[1]);
    char none;
    [[maybe_unused]] const ssize_t got = read(pipe_fds[0], &none, 1);  // Until the parent closes.
    _exit(0);
  });
  ::close(pipe_fds[1]);
  ::close(pipe_fds[0]);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST_F(ForkTest, NewDataArrivesAfterAnotherProgramRan) {
  check([](Pages&, Pages&) { EXPECT_EQ(std::system("true"), 0); });  // NOLINT: no secret in it.
}

}  // namespace
}  // namespace kvzc::lies

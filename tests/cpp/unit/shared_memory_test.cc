#include "base/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

using test::Child;
using test::mappings_of;
using test::open_fds;

constexpr std::uint64_t kPage = 4096;

SharedMemory must_create(std::uint64_t nbytes) {
  Result<SharedMemory> memory = SharedMemory::create("kvzc-test", nbytes);
  EXPECT_TRUE(memory.is_ok()) << memory.status().to_string();
  return memory.is_ok() ? memory.take() : SharedMemory();
}

OwnedFd duplicate(int fd) { return OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

OwnedFd memfd(std::uint64_t nbytes, int seals) {
  OwnedFd fd(memfd_create("kvzc-test-foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(nbytes)), 0);
  if (seals != 0) {
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  }
  return fd;
}

TEST(SharedMemory, IsZeroedWritableAndOfTheSizeAskedFor) {
  for (const std::uint64_t nbytes : {std::uint64_t{1}, kPage - 1, kPage, kPage + 1, 1000 * kPage}) {
    const SharedMemory memory = must_create(nbytes);
    ASSERT_EQ(memory.nbytes(), nbytes);
    EXPECT_TRUE(std::all_of(memory.data(), memory.data() + nbytes,
                            [](std::byte b) { return b == std::byte{0}; }));
    std::fill_n(memory.data(), nbytes, std::byte{7});
    struct stat info;
    ASSERT_EQ(fstat(memory.fd(), &info), 0);
    EXPECT_EQ(static_cast<std::uint64_t>(info.st_size), nbytes);
    // Allocated at once: a shortage is an error at creation, never a SIGBUS later.
    EXPECT_GE(static_cast<std::uint64_t>(info.st_blocks) * 512, nbytes);
  }
}

TEST(SharedMemory, CanNeitherShrinkNorGrowNorBeUnsealed) {
  const SharedMemory memory = must_create(2 * kPage);
  const int seals = fcntl(memory.fd(), F_GET_SEALS);
  EXPECT_EQ(seals & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_NE(ftruncate(memory.fd(), kPage), 0);
  EXPECT_NE(ftruncate(memory.fd(), 3 * kPage), 0);
  EXPECT_EQ(ftruncate(memory.fd(), 2 * kPage), 0);
  EXPECT_NE(fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(SharedMemory, IsClosedOnExecAndLeftWithNothingBehind) {
  const int fds = open_fds();
  const int mappings = mappings_of("kvzc-test");
  {
    const SharedMemory memory = must_create(kPage);
    EXPECT_NE(fcntl(memory.fd(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(open_fds(), fds + 1);
    EXPECT_EQ(mappings_of("kvzc-test"), mappings + 1);
  }
  EXPECT_EQ(open_fds(), fds);
  EXPECT_EQ(mappings_of("kvzc-test"), mappings);
}

TEST(SharedMemory, RefusesZeroBytes) {
  EXPECT_EQ(SharedMemory::create("kvzc-test", 0).status().code(), Code::kInvalidArgument);
  const SharedMemory memory = must_create(kPage);
  EXPECT_EQ(SharedMemory::map(duplicate(memory.fd()), 0, MapAccess::kRead).status().code(),
            Code::kProtocol);
}

// In a child that lives 0.4 s at most and is the first to go, because to look for such memory page
// by page would take all that the machine has. (ITIMER_PROF would not do: it waits for the end of a
// system call.)
TEST(SharedMemory, RefusesMoreThanTheMachineHasAtOnceAndLeaksNothing) {
  for (const std::uint64_t nbytes :
       {std::numeric_limits<std::uint64_t>::max(), std::uint64_t{1} << 63,
        (std::uint64_t{1} << 63) - 1, std::uint64_t{1} << 62, std::uint64_t{1} << 45}) {
    Child child([nbytes] {
      const OwnedFd victim(open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC));
      KVZC_CHILD_CHECK(write(victim.get(), "1000", 4) == 4);
      itimerval limit{};
      limit.it_value.tv_usec = 400'000;
      KVZC_CHILD_CHECK(setitimer(ITIMER_REAL, &limit, nullptr) == 0);
      const int fds = open_fds();
      const int mappings = mappings_of("kvzc-test");
      const Result<SharedMemory> memory = SharedMemory::create("kvzc-test", nbytes);
      KVZC_CHILD_CHECK(!memory.is_ok());
      KVZC_CHILD_CHECK(memory.status().code() == Code::kLimitExceeded);
      KVZC_CHILD_CHECK(memory.status().text().find(std::to_string(nbytes)) != std::string::npos);
      KVZC_CHILD_CHECK(open_fds() == fds);
      KVZC_CHILD_CHECK(mappings_of("kvzc-test") == mappings);
      return 0;
    });
    EXPECT_EQ(child.wait(), "exit 0") << nbytes << " bytes";
  }
}

// The kernel sends SIGXFSZ to who grows a file beyond this limit; nothing in kvzc ends the process.
TEST(SharedMemory, RefusesMoreThanTheLimitOfFileSizesAndLives) {
  Child child([] {
    const rlimit small{1u << 20, 1u << 20};
    KVZC_CHILD_CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    signal(SIGXFSZ, SIG_DFL);
    KVZC_CHILD_CHECK(SharedMemory::create("kvzc-test", 1u << 20).is_ok());
    const Result<SharedMemory> memory = SharedMemory::create("kvzc-test", 2u << 20);
    KVZC_CHILD_CHECK(memory.status().code() == Code::kLimitExceeded);
    return 0;
  });
  EXPECT_EQ(child.wait(), "exit 0");
}

#if !KVZC_SANITIZED
TEST(SharedMemory, SaysHowToRaiseTheLimitOfOpenFiles) {
  Child child([] {
    const rlimit none{static_cast<rlim_t>(0), static_cast<rlim_t>(0)};
    KVZC_CHILD_CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    const Result<SharedMemory> memory = SharedMemory::create("kvzc-test", kPage);
    KVZC_CHILD_CHECK(memory.status().code() == Code::kLimitExceeded);
    KVZC_CHILD_CHECK(memory.status().text().find("ulimit -n") != std::string_view::npos);
    return 0;
  });
  EXPECT_EQ(child.wait(), "exit 0");
}

TEST(SharedMemory, RefusesAMappingBeyondTheLimitOfAddressSpaceAndLeaksNothing) {
  Child child([] {
    const rlimit small{256u << 20, 256u << 20};
    KVZC_CHILD_CHECK(setrlimit(RLIMIT_AS, &small) == 0);
    const int fds = open_fds();
    const Result<SharedMemory> memory = SharedMemory::create("kvzc-test", 257u << 20);
    KVZC_CHILD_CHECK(memory.status().code() == Code::kLimitExceeded);
    KVZC_CHILD_CHECK(open_fds() == fds);
    return 0;
  });
  EXPECT_EQ(child.wait(), "exit 0");
}
#endif

TEST(SharedMemory, IsTheSameBytesForWhoMapsItsDescriptor) {
  const SharedMemory memory = must_create(3 * kPage);
  memory.data()[2 * kPage + 5] = std::byte{42};
  Result<SharedMemory> other =
      SharedMemory::map(duplicate(memory.fd()), 3 * kPage, MapAccess::kReadWrite);
  ASSERT_TRUE(other.is_ok()) << other.status().to_string();
  EXPECT_NE(other->data(), memory.data());
  EXPECT_EQ(other->data()[2 * kPage + 5], std::byte{42});
  other->data()[1] = std::byte{43};
  EXPECT_EQ(memory.data()[1], std::byte{43});
  EXPECT_EQ(other->identity(), memory.identity());
  EXPECT_FALSE(must_create(kPage).identity() == memory.identity());
  // Part of it may be mapped, and the mapping outlives its descriptor.
  other->close_fd();
  EXPECT_EQ(other->fd(), -1);
  EXPECT_EQ(other->data()[1], std::byte{43});
  EXPECT_TRUE(SharedMemory::map(duplicate(memory.fd()), 5, MapAccess::kRead).is_ok());
}

TEST(SharedMemory, RefusesToMapWhatCouldShrink) {
  const int fds = open_fds();
  for (const int seals : {0, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_GROW | F_SEAL_SEAL}) {
    EXPECT_EQ(SharedMemory::map(memfd(kPage, seals), kPage, MapAccess::kRead).status().code(),
              Code::kProtocol)
        << seals;
  }
  EXPECT_TRUE(SharedMemory::map(memfd(kPage, F_SEAL_SHRINK), kPage, MapAccess::kReadWrite).is_ok());
  EXPECT_EQ(open_fds(), fds);
}

TEST(SharedMemory, RefusesToMapWhatCannotBeSealed) {
  int pipe_fds[2];
  ASSERT_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
  OwnedFd out(pipe_fds[1]);
  EXPECT_EQ(SharedMemory::map(OwnedFd(pipe_fds[0]), kPage, MapAccess::kRead).status().code(),
            Code::kProtocol);
  OwnedFd zero(open("/dev/zero", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(SharedMemory::map(std::move(zero), kPage, MapAccess::kRead).status().code(),
            Code::kProtocol);
  OwnedFd file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(SharedMemory::map(std::move(file), kPage, MapAccess::kRead).status().code(),
            Code::kProtocol);
  EXPECT_EQ(SharedMemory::map(OwnedFd(), kPage, MapAccess::kRead).status().code(), Code::kProtocol);
}

TEST(SharedMemory, RefusesToMapMoreThanThereIs) {
  const SharedMemory memory = must_create(kPage + 1);
  for (const std::uint64_t nbytes :
       {kPage + 2, 2 * kPage, std::uint64_t{1} << 62, std::uint64_t{1} << 63,
        std::numeric_limits<std::uint64_t>::max()}) {
    const Result<SharedMemory> mapped =
        SharedMemory::map(duplicate(memory.fd()), nbytes, MapAccess::kRead);
    EXPECT_EQ(mapped.status().code(), Code::kProtocol) << nbytes;
  }
}

TEST(SharedMemory, GivesAReadOnlyDescriptorThatNobodyCanMapForWriting) {
  const SharedMemory memory = must_create(kPage);
  memory.data()[0] = std::byte{9};
  Result<OwnedFd> fd = memory.read_only_fd();
  ASSERT_TRUE(fd.is_ok()) << fd.status().to_string();
  EXPECT_NE(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  errno = 0;
  void* writable = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
  EXPECT_EQ(writable, MAP_FAILED);
  EXPECT_EQ(errno, EACCES);
  EXPECT_LT(write(fd->get(), "x", 1), 0);
  EXPECT_FALSE(SharedMemory::map(duplicate(fd->get()), kPage, MapAccess::kReadWrite).is_ok());
  void* readable = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd->get(), 0);
  ASSERT_NE(readable, MAP_FAILED);
  EXPECT_NE(mprotect(readable, kPage, PROT_READ | PROT_WRITE), 0);
  munmap(readable, kPage);
  Result<SharedMemory> mapped = SharedMemory::map(std::move(*fd), kPage, MapAccess::kRead);
  ASSERT_TRUE(mapped.is_ok()) << mapped.status().to_string();
  EXPECT_EQ(mapped->data()[0], std::byte{9});
}

TEST(SharedMemory, FaultsWhenAReadOnlyMappingIsWritten) {
  const SharedMemory memory = must_create(kPage);
  Result<OwnedFd> fd = memory.read_only_fd();
  ASSERT_TRUE(fd.is_ok());
  Result<SharedMemory> mapped = SharedMemory::map(std::move(*fd), kPage, MapAccess::kRead);
  ASSERT_TRUE(mapped.is_ok());
  Child child([&] {
    signal(SIGSEGV, SIG_DFL);
    *const_cast<volatile std::byte*>(mapped->data()) = std::byte{1};
    return 0;
  });
  EXPECT_EQ(child.wait(), "signal " + std::to_string(SIGSEGV));
}

TEST(SharedMemory, MovesWithoutMappingAgain) {
  const int fds = open_fds();
  {
    SharedMemory first = must_create(kPage);
    std::byte* const data = first.data();
    const FileIdentity identity = first.identity();
    SharedMemory second(std::move(first));
    EXPECT_EQ(second.data(), data);
    EXPECT_EQ(second.nbytes(), kPage);
    EXPECT_EQ(second.identity(), identity);
    SharedMemory third = must_create(2 * kPage);
    third = std::move(second);
    EXPECT_EQ(third.data(), data);
    EXPECT_EQ(third.nbytes(), kPage);
    EXPECT_EQ(open_fds(), fds + 1);
    SharedMemory& itself = third;
    third = std::move(itself);
    EXPECT_EQ(third.data(), data);
    EXPECT_EQ(third.nbytes(), kPage);
  }
  EXPECT_EQ(open_fds(), fds);
}

TEST(ForkGuard, TellsTheChildFromTheProcessThatMadeIt) {
  const ForkGuard guard;
  EXPECT_FALSE(guard.is_forked_child());
  Child child([&] {
    KVZC_CHILD_CHECK(guard.is_forked_child());
    // What the child makes is its own, and its child's is not.
    const ForkGuard own;
    KVZC_CHILD_CHECK(!own.is_forked_child());
    Child grandchild([&] {
      KVZC_CHILD_CHECK(own.is_forked_child());
      KVZC_CHILD_CHECK(guard.is_forked_child());
      return 0;
    });
    KVZC_CHILD_CHECK(grandchild.wait() == "exit 0");
    KVZC_CHILD_CHECK(!own.is_forked_child());
    return 0;
  });
  EXPECT_EQ(child.wait(), "exit 0");
  EXPECT_FALSE(guard.is_forked_child());
}

}  // namespace
}  // namespace kvzc

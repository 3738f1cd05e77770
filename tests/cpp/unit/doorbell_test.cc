#include "base/doorbell.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <thread>

#include "base/clock.h"
#include "unit/unit_support.h"

namespace kvzc {
namespace {

using test::Child;

constexpr std::int64_t kSecond = 1'000'000'000;

Doorbell must_create() {
  Result<Doorbell> bell = Doorbell::create();
  EXPECT_TRUE(bell.is_ok()) << bell.status().to_string();
  return bell.is_ok() ? bell.take() : Doorbell();
}

Doorbell must_open(const Doorbell& bell) {
  OwnedFd memory;
  OwnedFd event;
  const Status shared = bell.share(&memory, &event);
  EXPECT_TRUE(shared.is_ok()) << shared.to_string();
  Result<Doorbell> opened = Doorbell::open(std::move(memory), std::move(event));
  EXPECT_TRUE(opened.is_ok()) << opened.status().to_string();
  return opened.is_ok() ? opened.take() : Doorbell();
}

bool is_readable(int fd) {
  pollfd what{fd, POLLIN, 0};
  return poll(&what, 1, 0) == 1 && (what.revents & POLLIN) != 0;
}

TEST(Doorbell, CountsTheRingsOfBothSides) {
  const Doorbell owner = must_create();
  const Doorbell peer = must_open(owner);
  EXPECT_EQ(owner.count(), 0u);
  peer.ring();
  owner.ring();
  peer.ring();
  EXPECT_EQ(owner.count(), 3u);
  EXPECT_EQ(peer.count(), 3u);
}

TEST(Doorbell, DoesNotSleepWhenItHasRungSince) {
  const Doorbell bell = must_create();
  const std::uint32_t seen = bell.count();
  bell.ring();
  const std::int64_t before = now_ns();
  bell.sleep(seen, 20 * kSecond);
  EXPECT_LT(now_ns() - before, 5 * kSecond);
}

TEST(Doorbell, SleepsNoLongerThanTold) {
  const Doorbell bell = must_create();
  const std::int64_t before = now_ns();
  bell.sleep(bell.count(), 20'000'000);
  EXPECT_LT(now_ns() - before, 5 * kSecond);
  bell.sleep(bell.count(), 0);
}

TEST(Doorbell, WakesASleepingThread) {
  const Doorbell bell = must_create();
  const std::uint32_t seen = bell.count();
  std::atomic<bool> is_awake{false};
  std::int64_t slept_ns = 0;
  std::thread sleeper([&] {
    const std::int64_t before = now_ns();
    while (bell.count() == seen && now_ns() - before < 10 * kSecond) bell.sleep(seen, 10 * kSecond);
    slept_ns = now_ns() - before;
    is_awake = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(is_awake);
  bell.ring();
  sleeper.join();
  EXPECT_LT(slept_ns, 5 * kSecond);
}

TEST(Doorbell, WakesAllThreadsThatSleep) {
  const Doorbell bell = must_create();
  const std::uint32_t seen = bell.count();
  const std::int64_t before = now_ns();
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 4; ++i) {
    sleepers.emplace_back([&] {
      while (bell.count() == seen && now_ns() - before < 10 * kSecond) {
        bell.sleep(seen, 10 * kSecond);
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  bell.ring();
  for (std::thread& sleeper : sleepers) sleeper.join();
  EXPECT_LT(now_ns() - before, 5 * kSecond);
}

// Each side publishes a number, rings, and sleeps until the other has answered. A wake-up that is
// lost would leave the sleeper asleep for as long as it may, which is longer than all the rounds.
TEST(Doorbell, LosesNoWakeUpBetweenTwoProcesses) {
  constexpr std::uint32_t kRounds = 5000;
  constexpr std::int64_t kSleep = 15 * kSecond;
  struct Page {
    std::atomic<std::uint32_t> question;
    std::atomic<std::uint32_t> answer;
  };
  Result<SharedMemory> memory = SharedMemory::create("kvzc-test", sizeof(Page));
  ASSERT_TRUE(memory.is_ok());
  auto& page = *reinterpret_cast<Page*>(memory->data());
  const Doorbell parent_bell = must_create();
  const Doorbell child_bell = must_create();
  const auto wait_for = [](const Doorbell& bell, const std::atomic<std::uint32_t>& word,
                           std::uint32_t value) {
    for (;;) {
      const std::uint32_t seen = bell.count();
      if (word.load(std::memory_order_relaxed) == value) return true;
      const std::int64_t before = now_ns();
      bell.sleep(seen, kSleep);
      if (now_ns() - before >= kSleep - kSecond / 10) return false;
    }
  };
  Child child(
      [&] {
        const Doorbell to_parent = must_open(parent_bell);
        for (std::uint32_t round = 1; round <= kRounds; ++round) {
          KVZC_CHILD_CHECK(wait_for(child_bell, page.question, round));
          page.answer.store(round, std::memory_order_relaxed);
          to_parent.ring();
        }
        return 0;
      },
      40);
  const Doorbell to_child = must_open(child_bell);
  for (std::uint32_t round = 1; round <= kRounds; ++round) {
    // At times late, so that the child goes to sleep deeply, or is just about to.
    for (std::uint32_t spin = round % 97 * 8; spin > 0; --spin) now_ns();
    page.question.store(round, std::memory_order_relaxed);
    to_child.ring();
    ASSERT_TRUE(wait_for(parent_bell, page.answer, round)) << "round " << round;
  }
  EXPECT_EQ(child.wait(), "exit 0");
  EXPECT_GE(parent_bell.count(), kRounds);
}

TEST(Doorbell, MakesItsEventReadableOnlyWhenItIsArmed) {
  const Doorbell owner = must_create();
  const Doorbell peer = must_open(owner);
  EXPECT_FALSE(is_readable(owner.event_fd()));
  peer.ring();
  EXPECT_FALSE(is_readable(owner.event_fd()));
  owner.arm_event();
  EXPECT_FALSE(is_readable(owner.event_fd()));
  peer.ring();
  EXPECT_TRUE(is_readable(owner.event_fd()));
  owner.clear_event();
  EXPECT_FALSE(is_readable(owner.event_fd()));
  // The ring took the arming with it.
  peer.ring();
  EXPECT_FALSE(is_readable(owner.event_fd()));
}

TEST(Doorbell, SetsAndClearsItsEventAnyNumberOfTimes) {
  const Doorbell bell = must_create();
  bell.clear_event();
  EXPECT_FALSE(is_readable(bell.event_fd()));
  bell.set_event();
  bell.set_event();
  EXPECT_TRUE(is_readable(bell.event_fd()));
  bell.clear_event();
  EXPECT_FALSE(is_readable(bell.event_fd()));
}

TEST(Doorbell, WakesAPollInAnotherProcess) {
  const Doorbell owner = must_create();
  owner.arm_event();
  Child child([&] {
    must_open(owner).ring();
    return 0;
  });
  pollfd what{owner.event_fd(), POLLIN, 0};
  EXPECT_EQ(poll(&what, 1, 10'000), 1);
  EXPECT_EQ(child.wait(), "exit 0");
}

TEST(Doorbell, RefusesMemoryThatIsNoDoorbell) {
  const Doorbell bell = must_create();
  OwnedFd memory;
  OwnedFd event;
  ASSERT_TRUE(bell.share(&memory, &event).is_ok());
  Result<SharedMemory> small = SharedMemory::create("kvzc-test", 4);
  ASSERT_TRUE(small.is_ok());
  OwnedFd small_fd(dup(small->fd()));
  EXPECT_EQ(Doorbell::open(std::move(small_fd), std::move(event)).status().code(), Code::kProtocol);
  EXPECT_EQ(Doorbell::open(OwnedFd(), OwnedFd()).status().code(), Code::kProtocol);
}

// What the peer leaves unread in it would keep whoever rings.
TEST(Doorbell, RefusesAnEventThatMakesTheWriterWait) {
  const Doorbell bell = must_create();
  OwnedFd memory;
  OwnedFd event;
  ASSERT_TRUE(bell.share(&memory, &event).is_ok());
  OwnedFd waits(eventfd(0, EFD_CLOEXEC));
  OwnedFd again(dup(memory.get()));
  EXPECT_EQ(Doorbell::open(std::move(again), std::move(waits)).status().code(), Code::kProtocol);
  EXPECT_NE(fcntl(event.get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_TRUE(Doorbell::open(std::move(memory), std::move(event)).is_ok());
}

TEST(Doorbell, LeaksNoDescriptor) {
  const int before = test::open_fds();
  {
    const Doorbell owner = must_create();
    const Doorbell peer = must_open(owner);
  }
  EXPECT_EQ(test::open_fds(), before);
}

}  // namespace
}  // namespace kvzc

// A process that is killed at any point of a running transfer: the other is told within a second,
// no byte comes late or lands outside, and every counter is back where it began.
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class KillTest : public Conformance {};

constexpr std::uint64_t kBytes = 16 << 20;
constexpr std::uint64_t kGuard = 4096;

int count_descriptors() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<int>(std::distance(begin(files), end(files)));
}

// Mappings of memory that kvzc shares, and threads that it made.
int count_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:kvzc") != std::string::npos;
  }
  return count;
}

int count_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

struct Belongings {
  int descriptors = count_descriptors();
  int mappings = count_mappings();
  int threads = count_threads();
  bool operator==(const Belongings&) const = default;
};

void PrintTo(const Belongings& each, std::ostream* out) {
  *out << each.descriptors << " descriptors, " << each.mappings << " mappings, " << each.threads
       << " threads";
}

// What is let go of by the control thread is gone a moment later.
template <typename Condition>
bool comes_true(const Condition& condition) {
  const std::int64_t patience = in_seconds(5);
  while (!condition()) {
    if (in_seconds(0) > patience) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

std::chrono::microseconds random_pause() {
  static std::minstd_rand random(static_cast<unsigned>(getpid()));
  return std::chrono::microseconds(random() % 12'000);
}

TEST_P(KillTest, AWriterThatIsKilledAtAnyPointIsToldOfInASecondAndLeavesNothing) {
  const int count = rounds(50);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        std::optional<Belongings> before;
        for (int round = 0; round < count; ++round) {
          OwnedMemory memory = make_memory(*engine, kBytes + kGuard);
          fill(memory.data() + kBytes, kGuard, 7);
          party.tell(memory.handle_text());
          const auto writer = static_cast<pid_t>(std::stoi(party.hear()));
          const auto hello = engine->wait_arrivals("hello", 1, nullptr, in_seconds(30));
          ASSERT_TRUE(hello.is_ok()) << hello.status().to_string();
          const std::shared_ptr<const PeerInfo> peer = (*hello)[0].peer;
          std::int64_t killed_at = 0;
          std::thread killer([&] {
            std::this_thread::sleep_for(random_pause());
            killed_at = in_seconds(0);
            kill(writer, SIGKILL);
          });
          // Blocked when it happens.
          const auto never = engine->wait_arrivals("never", 1, peer.get(), in_seconds(30));
          const std::int64_t told_at = in_seconds(0);
          // Not one byte after that.
          const std::vector<std::byte> seen(memory.data(), memory.data() + kBytes);
          killer.join();
          ASSERT_EQ(never.status().code(), Code::kPeerLost) << never.status().to_string();
          EXPECT_LT(told_at - killed_at, 1'000'000'000);
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          ASSERT_EQ(std::memcmp(seen.data(), memory.data(), kBytes), 0) << "round " << round;
          ASSERT_EQ(first_difference(memory.data() + kBytes, kGuard, 7), -1) << "round " << round;
          const Status closed = memory.region.close(in_seconds(1));
          ASSERT_TRUE(closed.is_ok()) << closed.to_string();
          memory = OwnedMemory();
          ASSERT_TRUE(comes_true([&] { return engine->stats().peers == 0; }));
          const EngineStats stats = engine->stats();
          EXPECT_EQ(stats.regions, 0u);
          EXPECT_EQ(stats.storages, 0u);
          EXPECT_EQ(stats.grants, 0u);
          EXPECT_EQ(stats.quarantined_bytes, 0u);
          (void)engine->poll_arrivals(1000);
          if (!before) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            before = Belongings();
          }
          EXPECT_TRUE(comes_true([&] { return Belongings() == *before; }));
          EXPECT_EQ(Belongings(), *before) << "round " << round;
          party.tell("next");
        }
      },
      [&](Party& party) {
        for (int round = 0; round < count; ++round) {
          const std::string handle = party.hear();
          const pid_t writer = fork();
          if (writer == 0) {
            alarm(60);
            auto engine = party.make_engine();
            const RemoteView target = slice(open_handle(handle), 0, kBytes);
            std::vector<std::byte> source(kBytes);
            const LocalView view = view_of(*engine, source.data(), kBytes);
            put_and_wait(*engine, slice(view, 0, 1), slice(target, 0, 1), "hello");
            for (int value = 1;; value = value % 255 + 1) {
              std::memset(source.data(), value, kBytes);
              put_and_wait(*engine, view, target);
            }
          }
          party.tell(std::to_string(writer));
          party.hear();
          waitpid(writer, nullptr, 0);
        }
      });
}

TEST_P(KillTest, AnOwnerThatIsKilledAtAnyPointIsToldOfInASecondAndLeavesNothing) {
  const int count = rounds(50);
  run(
      [&](Party& party) {
        for (int round = 0; round < count; ++round) {
          const pid_t owner = fork();
          if (owner == 0) {
            alarm(60);
            auto engine = party.make_engine();
            OwnedMemory memory = make_memory(*engine, kBytes);
            party.tell(memory.handle_text());
            pause();
          }
          party.hear();  // The writer is at it.
          std::this_thread::sleep_for(random_pause());
          const std::int64_t killed_at = in_seconds(0);
          kill(owner, SIGKILL);
          party.tell(std::to_string(killed_at));
          waitpid(owner, nullptr, 0);
          party.hear();
        }
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        std::vector<std::byte> bytes(kBytes);
        std::optional<Belongings> before;
        for (int round = 0; round < count; ++round) {
          const Direction direction = round % 2 == 0 ? Direction::kPut : Direction::kGet;
          {
            const RemoteView remote = open_handle(party.hear());
            const LocalView view = view_of(*engine, bytes.data(), kBytes);
            ASSERT_TRUE(engine->connect(remote)->wait(in_seconds(30)).is_ok());
            party.tell("begun");
            Status status;
            while (status.is_ok()) {
              const TransferItem item{&view, &remote};
              Result<Transfer> transfer = direction == Direction::kPut
                                              ? engine->put({&item, 1}, {}, in_seconds(30))
                                              : engine->get({&item, 1}, {}, in_seconds(30));
              status = transfer.status();
              if (!transfer.is_ok()) break;
              status = transfer->wait(in_seconds(30));
              if (transfer->has_ended()) status = transfer->status();
            }
            const std::int64_t told_at = in_seconds(0);
            ASSERT_EQ(status.code(), Code::kPeerLost) << status.to_string();
            EXPECT_LT(told_at - std::stoll(party.hear()), 1'000'000'000);
          }
          // The memory is the program's own again: nothing writes to it, nothing reads it.
          ASSERT_TRUE(comes_true([&] { return engine->stats().transfers_running == 0; }));
          std::memset(bytes.data(), 0x5a, kBytes);
          ASSERT_TRUE(comes_true([&] { return engine->stats().peers == 0; }));
          if (!before) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            before = Belongings();
          }
          EXPECT_TRUE(comes_true([&] { return Belongings() == *before; }));
          EXPECT_EQ(Belongings(), *before) << "round " << round;
          ASSERT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](std::byte each) {
            return each == std::byte{0x5a};
          })) << "round " << round;
          party.tell("next");
        }
      });
}

// The control connection stays open in a child that the dead process has left behind.
TEST_P(KillTest, AForkedChildThatLivesOnDoesNotHideTheDeathOfItsParent) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 4096);
        party.tell(memory.handle_text());
        const auto writer = static_cast<pid_t>(std::stoi(party.hear()));
        const auto hello = engine->wait_arrivals("hello", 1, nullptr, in_seconds(30));
        ASSERT_TRUE(hello.is_ok()) << hello.status().to_string();
        const auto child = static_cast<pid_t>(std::stoi(party.hear()));
        kill(writer, SIGKILL);
        const std::int64_t at_most = in_seconds(1);
        const auto never = engine->wait_arrivals("never", 1, (*hello)[0].peer.get(), in_seconds(9));
        EXPECT_LT(in_seconds(0), at_most);
        EXPECT_EQ(never.status().code(), Code::kPeerLost) << never.status().to_string();
        EXPECT_EQ(kill(child, 0), 0);
        EXPECT_TRUE(memory.region.close(in_seconds(1)).is_ok());
        kill(child, SIGKILL);
        party.tell("end");
      },
      [](Party& party) {
        const std::string handle = party.hear();
        int child_pid[2];
        ASSERT_EQ(pipe2(child_pid, O_CLOEXEC), 0);
        const pid_t writer = fork();
        if (writer == 0) {
          alarm(60);
          auto engine = party.make_engine();
          std::byte source[64] = {};
          put_and_wait(*engine, view_of(*engine, source, sizeof source),
                       slice(open_handle(handle), 0, 64), "hello");
          // Not by Python, whose children close what they inherit.
          const pid_t child = fork();
          if (child == 0) {
            alarm(60);
            for (;;) pause();
          }
          (void)!write(child_pid[1], &child, sizeof child);
          for (;;) pause();
        }
        party.tell(std::to_string(writer));
        pid_t child = 0;
        ASSERT_EQ(read(child_pid[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
        party.tell(std::to_string(child));
        party.hear();
        waitpid(writer, nullptr, 0);
        close(child_pid[0]);
        close(child_pid[1]);
      });
}

// It lives, and might still write: that it has dropped its connection proves nothing.
TEST_P(KillTest, AProcessThatDropsItsSocketsIsLostAndWritesNoMore) {
  const int count = rounds(10);
  for (int round = 0; round < count; ++round) {
    run(
        [](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, kBytes);
          party.tell(memory.handle_text());
          const auto writer = static_cast<pid_t>(std::stoi(party.hear()));
          const auto hello = engine->wait_arrivals("hello", 1, nullptr, in_seconds(30));
          ASSERT_TRUE(hello.is_ok()) << hello.status().to_string();
          const auto never =
              engine->wait_arrivals("never", 1, (*hello)[0].peer.get(), in_seconds(9));
          EXPECT_EQ(never.status().code(), Code::kPeerLost) << never.status().to_string();
          // Its grant still holds, but it is lost.
          std::memset(memory.data(), 0x5a, kBytes);
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          EXPECT_TRUE(std::all_of(memory.data(), memory.data() + kBytes,
                                  [](std::byte each) { return each == std::byte{0x5a}; }));
          const Status closed = memory.region.close(in_seconds(5));
          EXPECT_TRUE(closed.is_ok()) << closed.to_string();
          kill(writer, SIGKILL);
        },
        [](Party& party) {
          const std::string handle = party.hear();
          const pid_t writer = fork();
          if (writer == 0) {
            alarm(60);
            auto engine = party.make_engine();
            const RemoteView target = open_handle(handle);
            std::vector<std::byte> source(kBytes, std::byte{1});
            const LocalView view = view_of(*engine, source.data(), kBytes);
            put_and_wait(*engine, slice(view, 0, 1), slice(target, 0, 1), "hello");
            std::thread closer([] {
              std::this_thread::sleep_for(std::chrono::milliseconds(3));
              // Past the C library: not even a sanitizer is to know.
              for (int fd = 3; fd < 256; ++fd) syscall(SYS_close, fd);
            });
            for (;;) {
              const TransferItem item{&view, &target};
              const Result<Transfer> transfer = engine->put({&item, 1}, {}, in_seconds(30));
              if (transfer.is_ok()) (void)transfer->wait(in_seconds(30));
            }
          }
          party.tell(std::to_string(writer));
          waitpid(writer, nullptr, 0);
        });
  }
}

Status put(Engine& engine, const LocalView& source, const RemoteView& target) {
  const TransferItem item{&source, &target};
  const Result<Transfer> transfer = engine.put({&item, 1}, {}, in_seconds(30));
  if (!transfer.is_ok()) return transfer.status();
  if (Status waited = transfer->wait(in_seconds(30)); !waited.is_ok()) return waited;
  return transfer->status();
}

TEST_P(KillTest, AKilledOwnerThatRestartsAtItsAddressIsAnotherOne) {
  const std::string name = "killed-" + std::to_string(getpid());
  std::string listen;
  const auto live = [&](Party& party) {
    if (GetParam().sut.between_hosts && listen.empty()) listen = listen_somewhere().address;
    const pid_t pid = fork();
    if (pid != 0) return pid;
    alarm(60);
    auto engine = party.make_engine([&](EngineOptions& options) {
      options.name = name;
      options.listen = listen;
    });
    OwnedMemory memory = make_memory(*engine, 4096);
    party.tell(memory.handle_text());
    for (;;) pause();
  };
  run(
      [&](Party& party) {
        const pid_t first = live(party);
        party.hear();
        kill(first, SIGKILL);
        waitpid(first, nullptr, 0);
        const pid_t second = live(party);
        party.hear();
        kill(second, SIGKILL);
        waitpid(second, nullptr, 0);
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView old = open_handle(party.hear());
        std::vector<std::byte> source(4096, std::byte{1});
        const LocalView view = view_of(*engine, source.data(), 4096);
        EXPECT_TRUE(put(*engine, view, old).is_ok());
        party.tell("written");
        const RemoteView fresh = open_handle(party.hear());
        EXPECT_NE(old.handle->info.incarnation, fresh.handle->info.incarnation);
        const Status stale = put_until_answered(*engine, view, old);
        EXPECT_EQ(stale.code(), Code::kStaleHandle) << stale.to_string();
        // The fresh one connects by itself.
        const Status again = put(*engine, view, fresh);
        EXPECT_TRUE(again.is_ok()) << again.to_string();
        party.tell("end");
      });
}

KVZC_CONFORMANCE_OF_PROCESSES(KillTest);

}  // namespace
}  // namespace kvzc::conformance

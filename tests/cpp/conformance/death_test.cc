// A peer that is killed is known to be lost, and what it leaves behind is nothing.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class DeathTest : public Conformance {};

std::shared_ptr<const PeerInfo> first_peer(Engine& engine) {
  auto arrivals = engine.wait_arrivals("hello", 1, nullptr, in_seconds(30));
  return arrivals.is_ok() ? (*arrivals)[0].peer : nullptr;
}

TEST_P(DeathTest, AWriterThatIsKilledInMidTransferIsLostAndItsTransferDoesNotArrive) {
  const std::uint64_t kBytes = large(128 << 20);
  const int count = rounds(5);
  for (int round = 0; round < count; ++round) {
    run(
        [&](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, kBytes + 4096);
          fill(memory.data() + kBytes, 4096, 7);
          party.tell(memory.handle_text());
          // The writer is a grandchild, so that its death is not the test's failure.
          const std::string pid = party.hear();
          const std::shared_ptr<const PeerInfo> peer = first_peer(*engine);
          ASSERT_NE(peer, nullptr);
          std::this_thread::sleep_for(std::chrono::milliseconds(1 + round * 3));
          std::thread killer([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            kill(static_cast<pid_t>(std::stoi(pid)), SIGKILL);
          });
          const std::int64_t at_most = in_seconds(10);
          const auto arrivals = engine->wait_arrivals("whole", 1, peer.get(), in_seconds(15));
          EXPECT_LT(in_seconds(0), at_most);  // Woken, not timed out.
          killer.join();
          EXPECT_EQ(arrivals.status().code(), Code::kPeerLost) << arrivals.status().to_string();
          // Not one byte after the loss is known, and none beyond the view ever.
          const std::vector<std::byte> seen(memory.data(), memory.data() + kBytes);
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          EXPECT_EQ(std::memcmp(seen.data(), memory.data(), kBytes), 0);
          EXPECT_EQ(first_difference(memory.data() + kBytes, 4096, 7), -1);
          EXPECT_TRUE(memory.region.close(in_seconds(5)).is_ok());
          const std::int64_t patience = in_seconds(2);
          while (engine->stats().peers != 0 && in_seconds(0) < patience) std::this_thread::yield();
          EXPECT_EQ(engine->stats().peers, 0u);
          EXPECT_EQ(engine->stats().grants, 0u);
        },
        [&](Party& party) {
          const std::string handle = party.hear();
          const pid_t pid = fork();
          if (pid == 0) {
            auto engine = party.make_engine();
            const RemoteView target = open_handle(handle);
            std::vector<std::byte> source(kBytes, std::byte{3});
            const LocalView view = view_of(*engine, source.data(), kBytes);
            const RemoteView inside = slice(target, 0, kBytes);
            put_and_wait(*engine, slice(view, 0, 1), slice(target, 0, 1), "hello");
            for (;;) {
              put_and_wait(*engine, view, inside, "again");
            }
          }
          party.tell(std::to_string(pid));
        });
  }
}

TEST_P(DeathTest, PutsToAnOwnerThatWasKilledEndAsPeerLost) {
  constexpr std::uint64_t kBytes = 64 << 20;
  run(
      [&](Party& party) {
        const pid_t pid = fork();
        if (pid == 0) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, kBytes);
          party.tell(memory.handle_text());
          pause();
        }
        party.hear();
        kill(pid, SIGKILL);
        party.tell("killed");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(*engine, source.data(), kBytes);
        put_and_wait(*engine, view, target);
        party.meet();
        Code code = Code::kOk;
        const std::int64_t patience = in_seconds(2);
        while (code == Code::kOk && in_seconds(0) < patience) {
          const TransferItem item{&view, &target};
          const Result<Transfer> transfer = engine->put({&item, 1}, {}, in_seconds(30));
          code = transfer.status().code();
          if (!transfer.is_ok()) break;
          ASSERT_TRUE(transfer->wait(in_seconds(30)).is_ok());
          code = transfer->status().code();
        }
        EXPECT_EQ(code, Code::kPeerLost) << code_name(code);
        EXPECT_EQ(engine->stats().transfers_running, 0u);
        // The transfer may hear of it a moment before the list of peers.
        while (engine->stats().peers != 0 && in_seconds(0) < patience) std::this_thread::yield();
        EXPECT_EQ(engine->stats().peers, 0u);
      });
}

TEST_P(DeathTest, PutsThatWaitForAnOwnerThatIsKilledEnd) {
  run(
      [&](Party& party) {
        const pid_t pid = fork();
        if (pid == 0) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, 4096);
          party.tell(memory.handle_text());
          pause();
        }
        party.hear();
        stop(pid);
        party.tell("stopped");
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        kill(pid, SIGKILL);
        party.hear();
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[4096] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        party.meet();
        const TransferItem item{&view, &target};
        const Transfer transfer = engine->put({&item, 1}, {}, in_seconds(30)).take();
        EXPECT_TRUE(transfer.wait(in_seconds(5)).is_ok());
        ASSERT_TRUE(transfer.has_ended());
        EXPECT_EQ(transfer.status().code(), Code::kPeerLost) << transfer.status().to_string();
        party.tell("end");
      });
}

TEST_P(DeathTest, APutThatWaitsForRoomEndsWithThePeer) {
  run(
      [&](Party& party) {
        const pid_t pid = fork();
        if (pid == 0) {
          auto engine =
              party.make_engine([](EngineOptions& options) { options.tuning.arrival_depth = 2; });
          OwnedMemory memory = make_memory(*engine, 64);
          party.tell(memory.handle_text());
          pause();
        }
        party.hear();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        kill(pid, SIGKILL);
        party.hear();
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[64] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        put_and_wait(*engine, view, target, "tag");
        put_and_wait(*engine, view, target, "tag");
        party.tell("full");
        TransferOptions options;
        options.notify = "tag";
        const TransferItem item{&view, &target};
        const std::int64_t at_most = in_seconds(5);
        const Result<Transfer> transfer = engine->put({&item, 1}, options, in_seconds(20));
        EXPECT_LT(in_seconds(0), at_most);
        EXPECT_EQ(transfer.status().code(), Code::kPeerLost) << transfer.status().to_string();
        party.tell("end");
      });
}

// A writer that is stopped in the middle of a chunk, as seen by the owner of `memory`; the owner
// says whether it was held up. One that is stopped between two chunks holds nobody up: then once
// more.
class StoppedWriterTest : public Conformance {
 protected:
  using Owner = std::function<bool(Engine& engine, OwnedMemory memory, pid_t writer)>;
  static constexpr std::uint64_t kBytes = 128 << 20;

  void run_stopped(const Owner& owner) {
    bool was_held_up = false;
    for (int round = 0; round < 30 && !was_held_up; ++round) {
      int answer[2];
      ASSERT_EQ(pipe2(answer, O_CLOEXEC | O_NONBLOCK), 0);
      run(
          [&](Party& party) {
            auto engine = party.make_engine();
            OwnedMemory memory = make_memory(*engine, kBytes);
            party.tell(memory.handle_text());
            const auto pid = static_cast<pid_t>(std::stoi(party.hear()));
            ASSERT_NE(first_peer(*engine), nullptr);
            // When some of it has come, each round another part, it is in the middle.
            const volatile std::byte& part = memory.data()[kBytes / 5 * static_cast<unsigned>(1 + round % 3)];
            for (const std::int64_t end = in_seconds(0.2); part == std::byte{} && in_seconds(0) < end;) {
            }
            stop(pid);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            const char was_held = owner(*engine, memory, pid) ? 'y' : 'n';
            EXPECT_EQ(write(answer[1], &was_held, 1), 1);
            kill(pid, SIGKILL);
          },
          [&](Party& party) {
            const std::string handle = party.hear();
            const pid_t pid = fork();
            if (pid == 0) {
              alarm(60);  // Should nobody end it.
              auto engine = party.make_engine();
              const RemoteView target = open_handle(handle);
              std::vector<std::byte> source(kBytes, std::byte{3});
              const LocalView view = view_of(*engine, source.data(), kBytes);
              put_and_wait(*engine, slice(view, 0, 1), slice(target, 0, 1), "hello");
              const TransferItem item{&view, &target};
              const Transfer transfer = engine->put({&item, 1}, {}, in_seconds(30)).take();
              (void)transfer.wait(in_seconds(30));
              pause();
            }
            party.tell(std::to_string(pid));
          });
      char was_held = 'n';
      ASSERT_EQ(read(answer[0], &was_held, 1), 1);
      was_held_up = was_held == 'y';
      close(answer[0]);
      close(answer[1]);
    }
    EXPECT_TRUE(was_held_up);
  }
};

TEST_P(StoppedWriterTest, ACloseThatWaitsForItEndsWithItsDeath) {
  run_stopped([](Engine&, OwnedMemory memory, pid_t writer) {
    std::atomic<bool> has_closed{false};
    std::thread closer([&] {
      const Status closed = memory.region.close(in_seconds(20));
      EXPECT_TRUE(closed.is_ok()) << closed.to_string();
      has_closed.store(true);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const bool was_held_up = !has_closed.load();
    kill(writer, SIGKILL);
    const std::int64_t at_most = in_seconds(5);
    closer.join();
    EXPECT_LT(in_seconds(0), at_most);
    return was_held_up;
  });
}

TEST_P(StoppedWriterTest, ACloseThatTimesOutNamesItAndHasRevokedAllTheSame) {
  run_stopped([](Engine&, OwnedMemory memory, pid_t writer) {
    const Status closed = memory.region.close(in_seconds(0.05));
    if (closed.is_ok()) return false;
    EXPECT_EQ(closed.code(), Code::kTimedOut) << closed.to_string();
    EXPECT_NE(std::string(closed.text()).find("pid " + std::to_string(writer)), std::string::npos)
        << closed.to_string();
    kill(writer, SIGCONT);
    // The chunk that it was in is over soon, and no other begins.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_EQ(memory.data()[kBytes - 1], std::byte{});
    return true;
  });
}

TEST_P(StoppedWriterTest, ARevokeTimesOutAndQuarantinesAndForceHoldsTheFence) {
  run_stopped([](Engine& engine, OwnedMemory memory, pid_t writer) {
    const Status revoked = memory.region.revoke(in_seconds(0.05), Force::kNo);
    if (revoked.is_ok()) return false;
    EXPECT_EQ(revoked.code(), Code::kTimedOut) << revoked.to_string();
    EXPECT_NE(revoked.text().find("pid " + std::to_string(writer)), std::string_view::npos)
        << revoked.to_string();
    EXPECT_EQ(engine.stats().quarantined_bytes, kBytes);
    EXPECT_EQ(engine.stats().peers, 1u);
    const Status forced = memory.region.revoke(in_seconds(0.05), Force::kYes);
    if (!can_hold_stopped_writers()) {
      // A build in which nothing can hold such a writer says so.
      EXPECT_EQ(forced.code(), Code::kUnsupported) << forced.to_string();
      return true;
    }
    EXPECT_TRUE(forced.is_ok()) << forced.to_string();
    EXPECT_EQ(engine.stats().quarantined_bytes, 0u);
    std::memset(memory.data(), 0x5a, kBytes);
    kill(writer, SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TRUE(std::all_of(memory.data(), memory.data() + kBytes,
                            [](std::byte each) { return each == std::byte{0x5a}; }));
    EXPECT_EQ(engine.stats().peers, 0u);
    // The region itself goes on.
    EXPECT_TRUE(memory.region.handle().is_ok());
    EXPECT_TRUE(memory.region.close(in_seconds(0.05)).is_ok());
    return true;
  });
}

TEST_P(StoppedWriterTest, QuarantineEndsByItselfWhenTheWriterGoesOn) {
  run_stopped([](Engine& engine, OwnedMemory memory, pid_t writer) {
    if (memory.region.revoke(in_seconds(0.02), Force::kNo).is_ok()) return false;
    EXPECT_EQ(engine.stats().quarantined_bytes, kBytes);
    kill(writer, SIGCONT);
    const std::int64_t patience = in_seconds(5);
    while (engine.stats().quarantined_bytes != 0 && in_seconds(0) < patience) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(engine.stats().quarantined_bytes, 0u);
    EXPECT_EQ(engine.stats().peers, 1u);
    std::memset(memory.data(), 0x5a, kBytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_TRUE(std::all_of(memory.data(), memory.data() + kBytes,
                            [](std::byte each) { return each == std::byte{0x5a}; }));
    return true;
  });
}

TEST_P(StoppedWriterTest, AnEngineThatClosesCutsItOffAndKeepsNothing) {
  run_stopped([](Engine& engine, OwnedMemory memory, pid_t writer) {
    if (memory.region.close(in_seconds(0.02)).is_ok()) return false;
    EXPECT_EQ(engine.stats().quarantined_bytes, kBytes);
    EXPECT_EQ(engine.stats().storages, 1u);
    (void)engine.close(in_seconds(1));
    EXPECT_EQ(engine.stats().quarantined_bytes == 0, can_hold_stopped_writers());
    EXPECT_EQ(engine.stats().storages == 0, can_hold_stopped_writers());
    // Whoever asks again is not told otherwise.
    EXPECT_EQ(memory.region.close(in_seconds(0.02)).is_ok(), can_hold_stopped_writers());
    kill(writer, SIGCONT);
    return true;
  });
}

KVZC_CONFORMANCE_OF_PROCESSES(DeathTest);
KVZC_CONFORMANCE_OF_PROCESSES(StoppedWriterTest);

}  // namespace
}  // namespace kvzc::conformance

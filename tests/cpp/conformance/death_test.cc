// A peer that is killed is known to be lost, and what it leaves behind is nothing.
#include <signal.h>
#include <unistd.h>

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
  if (GetParam().mode == Mode::kThreads) return;  // A thread cannot be killed alone.
  constexpr std::uint64_t kBytes = 128 << 20;
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
          const auto arrivals = engine->wait_arrivals("whole", 1, peer.get(), in_seconds(30));
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
  if (GetParam().mode == Mode::kThreads) return;
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
          const PutItem item{&view, &target};
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

KVZC_CONFORMANCE(DeathTest);

}  // namespace
}  // namespace kvzc::conformance

// Every order of closing ends, with and without traffic, and leaves nothing behind.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class TeardownTest : public Conformance {};

// What one process holds of both sides, so that all orders can be tried: engines, region, transfer.
struct Both {
  std::shared_ptr<Engine> owner, writer;
  OwnedMemory memory;
  std::vector<std::byte> source;
  std::vector<Transfer> transfers;
  RemoteView target;
};

constexpr std::int64_t kBytes = 1 << 20;

Both make_both(Party& party, bool with_traffic) {
  Both both;
  both.owner = party.make_engine();
  both.writer = party.make_engine();
  both.memory = make_memory(*both.owner, 4 * kBytes);
  both.target = open_handle(both.memory.handle_text());
  both.source.resize(kBytes);
  if (!with_traffic) return both;
  const LocalView view = view_of(*both.writer, both.source.data(), kBytes);
  for (int i = 0; i < 4; ++i) {
    const std::string tag = "tag " + std::to_string(i);
    TransferOptions options;
    options.notify = tag;
    const RemoteView target = slice(both.target, i * kBytes, (i + 1) * kBytes);
    const TransferItem item{&view, &target};
    both.transfers.push_back(both.writer->put({&item, 1}, options, in_seconds(30)).take());
  }
  return both;
}

void try_every_order(Party& party, bool with_traffic) {
  std::vector<int> order = {0, 1, 2, 3, 4};
  do {
    Both both = make_both(party, with_traffic);
    for (const int what : order) {
      switch (what) {
        case 0:
          both.owner.reset();
          break;
        case 1:
          both.writer.reset();
          break;
        case 2:
          EXPECT_TRUE(both.memory.region.close(in_seconds(30)).is_ok());
          break;
        case 3:
          both.memory.region = Region();
          both.target = RemoteView();
          break;
        case 4:
          // The source stays until its transfers have ended, as it does for everybody.
          for (const Transfer& transfer : both.transfers) {
            ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
            ASSERT_TRUE(transfer.has_ended());
          }
          both.transfers.clear();
          break;
      }
      if (what == 3) break;  // The region is needed to close it; what is left goes by itself.
    }
    for (const Transfer& transfer : both.transfers) {
      ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_P(TeardownTest, EveryOrderOfClosingEnds) {
  run([](Party& party) { try_every_order(party, false); }, [](Party&) {});
}

TEST_P(TeardownTest, EveryOrderOfClosingEndsWithTransfersRunning) {
  run([](Party& party) { try_every_order(party, true); }, [](Party&) {});
}

TEST_P(TeardownTest, AClosedEngineRefusesAndItsWaitersWake) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        std::thread waiter([&] {
          const std::int64_t at_most = in_seconds(10);
          const auto arrivals = engine->wait_arrivals("never", 1, nullptr, in_seconds(15));
          EXPECT_EQ(arrivals.status().code(), Code::kClosed);
          EXPECT_LT(in_seconds(0), at_most);  // Woken, not timed out.
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT_TRUE(engine->close(in_seconds(30)).is_ok());
        EXPECT_TRUE(engine->close(in_seconds(30)).is_ok());
        waiter.join();
        EXPECT_EQ(memory.region.handle().status().code(), Code::kClosed);
        EXPECT_EQ(memory.region.view().status().code(), Code::kClosed);
        std::byte byte{};
        TensorSpec spec;
        spec.shape = {1};
        spec.strides_bytes = {1};
        spec.data = spec.storage_data = &byte;
        spec.storage_nbytes = 1;
        EXPECT_EQ(engine->register_memory({&spec, 1}).status().code(), Code::kClosed);
        EXPECT_EQ(engine->stats().regions, 0u);
      },
      [](Party&) {});
}

TEST_P(TeardownTest, AnEngineThatClosesIsLostToItsPeerAndComesBackAsAnother) {
  const int count = rounds(20);
  run(
      [&](Party& party) {
        for (int round = 0; round < count; ++round) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, 4096);
          party.tell(memory.handle_text());
          party.hear();
          ASSERT_EQ(first_difference(memory.data(), 4096, static_cast<std::uint32_t>(round)), -1);
          EXPECT_TRUE(engine->close(in_seconds(30)).is_ok());
          party.tell("closed");
          party.hear();
        }
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        std::vector<std::byte> source(4096);
        const LocalView view = view_of(*engine, source.data(), source.size());
        for (int round = 0; round < count; ++round) {
          const RemoteView target = open_handle(party.hear());
          fill(source.data(), source.size(), static_cast<std::uint32_t>(round));
          put_and_wait(*engine, view, target);
          party.meet();
          const TransferItem item{&view, &target};
          const std::int64_t patience = in_seconds(2);
          Code code = Code::kOk;
          while (code == Code::kOk && in_seconds(0) < patience) {
            const Result<Transfer> transfer = engine->put({&item, 1}, {}, in_seconds(30));
            code = transfer.status().code();
            if (transfer.is_ok()) {
              ASSERT_TRUE(transfer->wait(in_seconds(30)).is_ok());
              code = transfer->status().code();
            }
          }
          // Revoked when the close of its region is seen first.
          EXPECT_TRUE(code == Code::kPeerLost || code == Code::kRevoked) << code_name(code);
          party.tell("next");
        }
        EXPECT_EQ(engine->stats().transfers_running, 0u);
      });
}

TEST_P(TeardownTest, TheRegionIsWrittenNoMoreOnceItsCloseHasReturned) {
  const int count = rounds(20);
  const std::uint64_t kLarge = large(32 << 20);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        for (int round = 0; round < count; ++round) {
          OwnedMemory memory = make_memory(*engine, kLarge);
          party.tell(memory.handle_text());
          party.hear();
          std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
          const Status closed = memory.region.close(in_seconds(30));
          ASSERT_TRUE(closed.is_ok()) << closed.to_string();
          // The memory is ours again: nobody else writes into it.
          std::memset(memory.data(), 0x5a, kLarge);
          party.meet();
          for (std::uint64_t i = 0; i < kLarge; ++i) {
            ASSERT_EQ(memory.data()[i], std::byte{0x5a}) << "round " << round << " byte " << i;
          }
          party.tell("next");
        }
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        std::vector<std::byte> source(kLarge, std::byte{1});
        const LocalView view = view_of(*engine, source.data(), kLarge);
        for (int round = 0; round < count; ++round) {
          const RemoteView target = open_handle(party.hear());
          ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
          party.tell("connected");
          Code code = Code::kOk;
          const std::int64_t patience = in_seconds(30);
          while (code == Code::kOk && in_seconds(0) < patience) {
            const TransferItem item{&view, &target};
            const Result<Transfer> transfer = engine->put({&item, 1}, {}, in_seconds(30));
            code = transfer.status().code();
            if (!transfer.is_ok()) break;
            ASSERT_TRUE(transfer->wait(in_seconds(30)).is_ok());
            code = transfer->status().code();
          }
          EXPECT_EQ(code, Code::kRevoked) << code_name(code);
          party.meet();
          party.hear();
        }
      });
}

// Mappings of shared memory of at least `nbytes` in this process.
int count_mappings(std::uint64_t nbytes) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2) continue;
    if (end - begin == nbytes && line.find("memfd:kvzc") != std::string::npos) ++count;
  }
  return count;
}

TEST_P(TeardownTest, AClosedRegionLeavesNothingBehindOnEitherSide) {
  constexpr std::uint64_t kOdd = (1 << 20) + 12 * 4096;  // A size that nothing else here has.
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kOdd);
        const std::weak_ptr<TestMemory> allocation = memory.allocation;
        memory.allocation.reset();
        party.tell(memory.handle_text());
        party.hear();
        EXPECT_EQ(engine->stats().regions, 1u);
        EXPECT_EQ(engine->stats().storages, 1u);
        EXPECT_EQ(engine->stats().grants, 1u);
        EXPECT_FALSE(allocation.expired());
        EXPECT_TRUE(memory.region.close(in_seconds(30)).is_ok());
        EXPECT_FALSE(memory.region.is_open());
        EXPECT_EQ(memory.region.view().status().code(), Code::kClosed);
        EXPECT_EQ(engine->stats().regions, 0u);
        EXPECT_EQ(engine->stats().storages, 0u);
        EXPECT_EQ(engine->stats().grants, 0u);
        EXPECT_TRUE(allocation.expired());
        party.tell("closed");
        party.hear();
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kOdd);
        put_and_wait(*engine, view_of(*engine, source.data(), kOdd), target);
        EXPECT_EQ(count_mappings(kOdd) > 0,
                  memory_kind() == MemoryKind::kSharable &&
                      (!GetParam().sut.is_remote || GetParam().mode == Mode::kThreads));
        party.meet();
        // The peer hears of it and lets go, without doing anything.
        const std::int64_t patience = in_seconds(5);
        while (count_mappings(kOdd) != 0 && in_seconds(0) < patience) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        EXPECT_EQ(count_mappings(kOdd), 0);
        party.tell("end");
      });
}

TEST_P(TeardownTest, ClosingAnEngineEndsWhatWaitsForAPeer) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        const TestListener listener = listen_somewhere();  // Accepts nobody and says nothing.
        const RemoteView target = at_address(open_handle(memory.handle_text()), listener.address);
        std::byte source[64] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        const TransferItem item{&view, &target};
        const Transfer transfer = engine->put({&item, 1}, {}, in_seconds(30)).take();
        const std::int64_t at_most = in_seconds(3);
        EXPECT_TRUE(engine->close(in_seconds(5)).is_ok());
        EXPECT_LT(in_seconds(0), at_most);
        ASSERT_TRUE(transfer.has_ended());
        EXPECT_EQ(transfer.status().code(), Code::kClosed) << transfer.status().to_string();
      },
      [](Party&) {});
}

TEST_P(TeardownTest, AnEngineThatClosesSaysSoAndItsTagsStillCount) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        const auto hello = engine->wait_arrivals("hello", 1, nullptr, in_seconds(30));
        ASSERT_TRUE(hello.is_ok()) << hello.status().to_string();
        party.meet();
        const std::int64_t patience = in_seconds(5);
        while (engine->stats().peers != 0 && in_seconds(0) < patience) std::this_thread::yield();
        const Status why = engine->peer_status(*(*hello)[0].peer);
        EXPECT_EQ(why.code(), Code::kPeerLost);
        EXPECT_NE(std::string(why.text()).find("its engine was closed"), std::string::npos)
            << why.to_string();
        // Nobody looked before the peer was gone.
        EXPECT_TRUE(engine->wait_arrivals("last words", 1, nullptr, in_seconds(1)).is_ok());
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[64] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        put_and_wait(*engine, view, target, "hello");
        party.hear();
        put_and_wait(*engine, view, target, "last words");
        EXPECT_TRUE(engine->close(in_seconds(30)).is_ok());
        party.tell("closed");
      });
}

TEST_P(TeardownTest, AnEngineThatClosesGivesRunningTransfersTimeAndThenStopsThem) {
  const std::uint64_t kLarge = large(256 << 20);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kLarge);
        party.tell(memory.handle_text());
        party.hear();
        // Some was not begun (how much is the machine's to say), and nothing begins after the close.
        const auto moved = [&] {
          return std::count(memory.data(), memory.data() + kLarge, std::byte{7});
        };
        const auto at_close = moved();
        EXPECT_LT(at_close, static_cast<std::ptrdiff_t>(kLarge));
        EXPECT_EQ(moved(), at_close);
        party.meet();
        EXPECT_EQ(moved(), static_cast<std::ptrdiff_t>(kLarge));
        party.tell("seen");
      },
      [&](Party& party) {
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kLarge, std::byte{7});
        for (const double seconds : {0.0, 30.0}) {
          auto engine = party.make_engine();
          const LocalView view = view_of(*engine, source.data(), kLarge);
          ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
          const TransferItem item{&view, &target};
          const Transfer transfer = engine->put({&item, 1}, {}, in_seconds(30)).take();
          const Status closed = engine->close(in_seconds(seconds));
          ASSERT_TRUE(transfer.has_ended());
          if (seconds == 0) {
            EXPECT_EQ(closed.code(), Code::kTimedOut) << closed.to_string();
            EXPECT_EQ(transfer.status().code(), Code::kClosed) << transfer.status().to_string();
          } else {
            EXPECT_TRUE(closed.is_ok()) << closed.to_string();
            EXPECT_TRUE(transfer.status().is_ok()) << transfer.status().to_string();
          }
          party.tell("closed");
          party.hear();
        }
      });
}

// Threads of this process that engines made.
int count_engine_threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    count += std::getline(file, name) && name.starts_with("kvzc-");
  }
  return count;
}

// The kernel lists a thread for a moment after it was joined.
bool are_soon_gone() {
  const std::int64_t patience = in_seconds(1);
  while (count_engine_threads() != 0 && in_seconds(0) < patience) std::this_thread::yield();
  return count_engine_threads() == 0;
}

TEST_P(TeardownTest, AClosedEngineHasNoThreadsLeft) {
  run(
      [](Party& party) {
        ASSERT_TRUE(are_soon_gone());
        Both both = make_both(party, true);
        for (const Transfer& transfer : both.transfers) {
          ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
        }
        EXPECT_GE(count_engine_threads(), 3);
        // Everything else is still held.
        EXPECT_TRUE(both.writer->close(in_seconds(30)).is_ok());
        EXPECT_TRUE(both.owner->close(in_seconds(30)).is_ok());
        EXPECT_TRUE(are_soon_gone());
      },
      [](Party&) {});
}

KVZC_CONFORMANCE(TeardownTest);

}  // namespace
}  // namespace kvzc::conformance

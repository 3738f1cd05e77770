// Every order of closing ends, with and without traffic, and leaves nothing behind.
#include <algorithm>
#include <cstring>
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
    PutOptions options;
    options.notify = tag;
    const RemoteView target = slice(both.target, i * kBytes, (i + 1) * kBytes);
    const PutItem item{&view, &target};
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
          const auto arrivals = engine->wait_arrivals("never", 1, nullptr, in_seconds(60));
          EXPECT_EQ(arrivals.status().code(), Code::kClosed);
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
          const PutItem item{&view, &target};
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
  constexpr std::uint64_t kLarge = 32 << 20;
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
            const PutItem item{&view, &target};
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

KVZC_CONFORMANCE(TeardownTest);

}  // namespace
}  // namespace kvzc::conformance

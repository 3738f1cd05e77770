// What is promised holds under trouble: each transfer ends exactly once whatever fails, a notify is
// never seen before its data however the stripes travel, and a peer that falls silent is told of.
#include <algorithm>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class TroubleTest : public Conformance {};

using Change = std::function<void(EngineOptions&)>;

Change with(const FaultOptions& faults) {
  return [faults](EngineOptions& options) { options.faults = faults; };
}

struct Ends {
  std::uint64_t done = 0, failed = 0, cancelled = 0;
  void count(const Transfer& transfer) {
    ASSERT_TRUE(transfer.has_ended());
    const Code code = transfer.status().code();
    ++(code == Code::kOk ? done : code == Code::kCancelled ? cancelled : failed);
  }
};

// A thousand transfers a round: a soak of a thousand rounds is a million.
TEST_P(TroubleTest, EachTransferEndsOnceAndSoDoesItsTag) {
  const int count = rounds(50) * 1000;
  constexpr std::int64_t kSlot = 4096;
  constexpr std::size_t kWindow = 256;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kSlot * kWindow);
        party.tell(memory.handle_text());
        std::vector<char> seen(static_cast<std::size_t>(count), 0);
        std::uint64_t good = 0, bad = 0;
        const std::int64_t patience = in_seconds(100 + rounds(0));
        while (good + bad < static_cast<std::uint64_t>(count) && in_seconds(0) < patience) {
          for (const Arrival& arrival : engine->poll_arrivals(256)) {
            char& is_seen = seen[static_cast<std::size_t>(std::stoi(arrival.tag))];
            ASSERT_EQ(is_seen, 0) << "tag " << arrival.tag << " came twice";
            is_seen = 1;
            ++(arrival.code == Code::kOk ? good : bad);
          }
        }
        const std::string ends = party.hear();
        EXPECT_EQ(std::to_string(good) + " " + std::to_string(bad), ends);
      },
      [&](Party& party) {
        FaultOptions faults;
        faults.stripe_bytes = 512;
        faults.reorder = true;
        faults.post_failure = 0.05;
        faults.stripe_failure = 0.05;
        faults.completion_loss = 0.01;
        auto engine = party.make_engine(with(faults));
        const RemoteView target = open_handle(party.hear());
        ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
        std::vector<std::byte> source(kSlot * kWindow);
        const LocalView view = view_of(*engine, source.data(), source.size());
        const EngineStats before = engine->stats();
        std::vector<Transfer> window(kWindow);
        Ends ends;
        const auto end_one = [&](Transfer& transfer) {
          ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
          ends.count(transfer);
          transfer = Transfer();
        };
        for (int i = 0; i < count; ++i) {
          const auto place = static_cast<std::size_t>(i) % kWindow;
          if (i >= static_cast<int>(kWindow)) end_one(window[place]);
          const std::int64_t at = static_cast<std::int64_t>(place) * kSlot;
          const std::int64_t size = 1 + (i * 37) % kSlot;
          const std::string tag = std::to_string(i);
          TransferOptions options;
          options.notify = tag;
          options.deadline_ns = in_seconds(0.02);  // The end of those whose end is never told.
          const LocalView from = slice(view, at, at + size);
          const RemoteView to = slice(target, at, at + size);
          const TransferItem item{&from, &to};
          window[place] = engine->put({&item, 1}, options, in_seconds(30)).take();
        }
        for (Transfer& transfer : window) end_one(transfer);
        const EngineStats stats = engine->stats();
        EXPECT_EQ(stats.transfers_running, 0u);
        EXPECT_EQ(stats.transfers_done - before.transfers_done, ends.done);
        EXPECT_EQ(stats.transfers_failed - before.transfers_failed, ends.failed);
        EXPECT_EQ(stats.transfers_cancelled - before.transfers_cancelled, ends.cancelled);
        EXPECT_EQ(ends.done + ends.failed + ends.cancelled, static_cast<std::uint64_t>(count));
        EXPECT_GT(ends.failed, 0u);
        EXPECT_GT(ends.cancelled, 0u);
        EXPECT_GT(ends.done, ends.failed);
        party.tell(std::to_string(ends.done) + " " + std::to_string(ends.failed + ends.cancelled));
      });
}

TEST_P(TroubleTest, ANotifyIsNeverSeenBeforeItsDataOnTheStreamingPath) {
  const int count = rounds(50) * 10;
  constexpr std::uint64_t kBytes = 64 << 10;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBytes);
        party.tell(memory.handle_text());
        for (int round = 0; round < count; ++round) {
          const auto tag = engine->wait_arrivals("data", 1, nullptr, in_seconds(30));
          ASSERT_TRUE(tag.is_ok()) << tag.status().to_string();
          const auto value = static_cast<std::byte>(round % 255 + 1);
          // From the end, which a copy reaches last.
          for (std::uint64_t i = kBytes; i-- > 0;) {
            ASSERT_EQ(memory.data()[i], value) << "round " << round << " byte " << i;
          }
          party.tell("seen");
        }
      },
      [&](Party& party) {
        FaultOptions faults;
        faults.stripe_bytes = 4096;
        faults.reorder = true;
        faults.most_delay_seconds = 0.0002;
        auto engine = party.make_engine([&](EngineOptions& options) {
          options.faults = faults;
          options.tuning.copy_threads = 2;
          options.tuning.inline_bytes = 2048;
          options.tuning.chunk_bytes = 4096;
          options.tuning.streaming_bytes = 2048;
        });
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(*engine, source.data(), kBytes);
        for (int round = 0; round < count; ++round) {
          std::memset(source.data(), round % 255 + 1, kBytes);
          TransferOptions options;
          options.notify = "data";
          const TransferItem item{&view, &target};
          const Transfer transfer = engine->put({&item, 1}, options, in_seconds(30)).take();
          party.hear();  // By the tag alone; nobody has waited for the transfer.
          ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
        }
      });
}

TEST_P(TroubleTest, ALostEndIsWaitedForUntilItIsCancelledAndTheOtherSideHears) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 4096);
        party.tell(memory.handle_text());
        const auto tag = engine->wait_arrivals("tag", 1, nullptr, in_seconds(30));
        ASSERT_TRUE(tag.is_ok()) << tag.status().to_string();
        EXPECT_EQ((*tag)[0].code, Code::kCancelled);
        party.tell("heard");
        party.hear();
      },
      [](Party& party) {
        FaultOptions faults;
        faults.completion_loss = 1;
        auto engine = party.make_engine(with(faults));
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(4096, std::byte{1});
        const LocalView view = view_of(*engine, source.data(), 4096);
        TransferOptions options;
        options.notify = "tag";
        const TransferItem item{&view, &target};
        const Transfer transfer = engine->put({&item, 1}, options, in_seconds(30)).take();
        EXPECT_EQ(transfer.wait(in_seconds(0.1)).code(), Code::kTimedOut);
        EXPECT_FALSE(transfer.has_ended());
        EXPECT_TRUE(transfer.cancel(in_seconds(30)).is_ok());
        ASSERT_TRUE(transfer.has_ended());
        EXPECT_EQ(transfer.status().code(), Code::kCancelled);
        party.hear();
        EXPECT_EQ(engine->stats().transfers_running, 0u);
        party.tell("end");
      });
}

TEST_P(TroubleTest, APeerThatFallsSilentIsLostInTimeToAllWhoWait) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 4096);
        party.tell(memory.handle_text());
        party.hear();
      },
      [](Party& party) {
        FaultOptions faults;
        faults.vanish_after_posts = 10;
        faults.detection_seconds = 0.3;
        auto engine = party.make_engine(with(faults));
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(4096, std::byte{1});
        const LocalView view = view_of(*engine, source.data(), 4096);
        ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
        const std::shared_ptr<const PeerInfo> peer = engine->peer_of(target).take();
        const std::int64_t at_most = in_seconds(5);
        std::thread waiter([&] {
          const auto never = engine->wait_arrivals("never", 1, peer.get(), in_seconds(20));
          EXPECT_EQ(never.status().code(), Code::kPeerLost) << never.status().to_string();
        });
        std::vector<Transfer> transfers;
        Status status;
        while (status.is_ok() && transfers.size() < 20) {
          const TransferItem item{&view, &target};
          Result<Transfer> transfer = engine->put({&item, 1}, {}, in_seconds(30));
          status = transfer.status();
          if (transfer.is_ok()) transfers.push_back(transfer.take());
        }
        waiter.join();
        const Status waited = transfers.back().wait(in_seconds(20));
        EXPECT_TRUE(waited.is_ok() || waited.code() == Code::kPeerLost) << waited.to_string();
        EXPECT_LT(in_seconds(0), at_most);
        const std::int64_t patience = in_seconds(5);
        while (engine->stats().transfers_running != 0 && in_seconds(0) < patience) {
          std::this_thread::yield();
        }
        EXPECT_EQ(engine->stats().transfers_running, 0u);
        EXPECT_EQ(transfers.back().status().code(), Code::kPeerLost);
        const TransferItem item{&view, &target};
        EXPECT_EQ(engine->put({&item, 1}, {}, in_seconds(1)).status().code(), Code::kPeerLost);
        party.tell("end");
      });
}

TEST_P(TroubleTest, AnEngineClosesInAnyTrouble) {
  run(
      [](Party& party) {
        for (int kind = 0; kind < 4; ++kind) {
          auto owner = party.make_engine();
          OwnedMemory memory = make_memory(*owner, 1 << 20);
          FaultOptions faults;
          faults.stripe_bytes = 4096;
          if (kind == 0) faults.most_delay_seconds = 0.5;
          if (kind == 1) faults.completion_loss = 1;
          if (kind == 2) faults.vanish_after_posts = 2;
          if (kind == 3) faults.stripe_failure = 1;
          auto engine = party.make_engine(with(faults));
          const RemoteView target = open_handle(memory.handle_text());
          std::vector<std::byte> source(1 << 20);
          const LocalView view = view_of(*engine, source.data(), source.size());
          std::vector<Transfer> transfers;
          for (int i = 0; i < 8; ++i) {
            TransferOptions options;
            options.notify = "tag";
            const TransferItem item{&view, &target};
            Result<Transfer> transfer = engine->put({&item, 1}, options, in_seconds(30));
            if (transfer.is_ok()) transfers.push_back(transfer.take());
          }
          const std::int64_t at_most = in_seconds(10);
          (void)engine->close(in_seconds(0.1));
          EXPECT_LT(in_seconds(0), at_most);
          for (const Transfer& transfer : transfers) EXPECT_TRUE(transfer.has_ended()) << kind;
          EXPECT_EQ(engine->stats().transfers_running, 0u) << kind;
        }
      },
      [](Party&) {});
}

INSTANTIATE_TEST_SUITE_P(, TroubleTest, ::testing::ValuesIn([] {
                           std::vector<Case> cases = all_cases();
                           std::erase_if(cases,
                                         [](const Case& each) { return each.sut.name != "shm"; });
                           return cases;
                         }()),
                         case_name);

}  // namespace
}  // namespace kvzc::conformance

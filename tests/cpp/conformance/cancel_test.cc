// Cancel and deadlines: a transfer that was told to stop is over when the call returns, on both
// sides, to the byte; and what ends by itself ends in time.
#include <algorithm>
#include <cstring>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class CancelTest : public Conformance {};

constexpr std::uint64_t kBytes = 16 << 20;

TEST_P(CancelTest, AfterACancelOfAPutTheTargetChangesNoMoreAndTheSourceIsFree) {
  const int count = rounds(50);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBytes);
        party.tell(memory.handle_text());
        for (int round = 0; round < count; ++round) {
          const std::string how = party.hear();
          const std::vector<std::byte> seen(memory.data(), memory.data() + kBytes);
          // The source holds this now; nobody may have read it.
          ASSERT_EQ(std::find(seen.begin(), seen.end(), std::byte{0xee}), seen.end())
              << "round " << round;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          ASSERT_EQ(std::memcmp(seen.data(), memory.data(), kBytes), 0) << "round " << round;
          const auto told = engine->wait_arrivals("tag", 1, nullptr, in_seconds(30));
          ASSERT_TRUE(told.is_ok()) << told.status().to_string();
          EXPECT_EQ((*told)[0].code, how == "done" ? Code::kOk : Code::kCancelled);
          if (how == "done") {
            const std::byte value = memory.data()[0];
            EXPECT_TRUE(std::all_of(seen.begin(), seen.end(),
                                    [value](std::byte each) { return each == value; }));
          }
          party.tell("next");
        }
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(*engine, source.data(), kBytes);
        ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
        int cancelled = 0;
        for (int round = 0; round < count; ++round) {
          std::memset(source.data(), 1 + round % 200, kBytes);
          TransferOptions options;
          options.notify = "tag";
          const TransferItem item{&view, &target};
          const Transfer transfer = engine->put({&item, 1}, options, in_seconds(30)).take();
          std::this_thread::sleep_for(std::chrono::microseconds(97 * (round % 16)));
          const Status stopped = transfer.cancel(in_seconds(30));
          std::memset(source.data(), 0xee, kBytes);
          ASSERT_TRUE(stopped.is_ok()) << stopped.to_string();
          ASSERT_TRUE(transfer.has_ended());
          const Code code = transfer.status().code();
          ASSERT_TRUE(code == Code::kOk || code == Code::kCancelled) << code_name(code);
          cancelled += code == Code::kCancelled;
          party.tell(code == Code::kOk ? "done" : "cancelled");
          party.hear();
        }
        EXPECT_GT(cancelled, 0);
        const EngineStats stats = engine->stats();
        EXPECT_EQ(stats.transfers_cancelled, static_cast<std::uint64_t>(cancelled));
        EXPECT_EQ(stats.transfers_running, 0u);
      });
}

TEST_P(CancelTest, AfterACancelOfAGetTheTargetIsTheCallersAgain) {
  const int count = rounds(50);
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBytes);
        std::memset(memory.data(), 0x33, kBytes);
        party.tell(memory.handle_text());
        party.hear();
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView source = open_handle(party.hear());
        std::vector<std::byte> target(kBytes);
        const LocalView view = view_of(*engine, target.data(), kBytes);
        ASSERT_TRUE(engine->connect(source)->wait(in_seconds(30)).is_ok());
        for (int round = 0; round < count; ++round) {
          const TransferItem item{&view, &source};
          Result<Transfer> started = engine->get({&item, 1}, {}, in_seconds(30));
          ASSERT_TRUE(started.is_ok()) << started.status().to_string();
          const Transfer transfer = started.take();
          std::this_thread::sleep_for(std::chrono::microseconds(97 * (round % 16)));
          ASSERT_TRUE(transfer.cancel(in_seconds(30)).is_ok());
          std::memset(target.data(), 0x5a, kBytes);
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          ASSERT_TRUE(std::all_of(target.begin(), target.end(), [](std::byte each) {
            return each == std::byte{0x5a};
          })) << "round " << round;
        }
        party.tell("end");
      });
}

TEST_P(CancelTest, ADeadlineEndsATransferThatWaitsForItsPeer) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        const TestListener listener = listen_somewhere();  // Says nothing.
        const RemoteView target = at_address(open_handle(memory.handle_text()), listener.address);
        std::byte source[64] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        TransferOptions options;
        options.deadline_ns = in_seconds(0.1);
        const TransferItem item{&view, &target};
        const Transfer transfer = engine->put({&item, 1}, options, in_seconds(30)).take();
        const std::int64_t at_most = in_seconds(3);
        ASSERT_TRUE(transfer.wait(in_seconds(8)).is_ok());
        EXPECT_LT(in_seconds(0), at_most);
        EXPECT_EQ(transfer.status().code(), Code::kCancelled);
        EXPECT_NE(transfer.status().text().find("deadline"), std::string_view::npos);
        EXPECT_GE(transfer.done_ns(), options.deadline_ns);
      },
      [](Party&) {});
}

TEST_P(CancelTest, ADeadlineThatIsNotReachedChangesNothing) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 4096);
        party.tell(memory.handle_text());
        for (int i = 0; i < 1000; ++i) {
          const auto tag = engine->wait_arrivals("tag", 1, nullptr, in_seconds(30));
          ASSERT_TRUE(tag.is_ok()) << tag.status().to_string();
          ASSERT_EQ((*tag)[0].code, Code::kOk);
        }
        party.tell("end");
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[4096] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        for (int i = 0; i < 1000; ++i) {
          TransferOptions options;
          options.notify = "tag";
          // Also ones that come earlier than those before.
          options.deadline_ns = in_seconds(30 - 0.01 * i);
          const TransferItem item{&view, &target};
          const Transfer transfer = engine->put({&item, 1}, options, in_seconds(30)).take();
          ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
          ASSERT_TRUE(transfer.status().is_ok()) << transfer.status().to_string();
        }
        EXPECT_EQ(engine->stats().transfers_cancelled, 0u);
        party.hear();
      });
}

TEST_P(CancelTest, ADeadlineThatHasPassedMovesNothingAndTellsTheOtherSide) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 4096);
        party.tell(memory.handle_text());
        const auto tag = engine->wait_arrivals("tag", 1, nullptr, in_seconds(30));
        ASSERT_TRUE(tag.is_ok()) << tag.status().to_string();
        EXPECT_EQ((*tag)[0].code, Code::kCancelled);
        EXPECT_TRUE(std::all_of(memory.data(), memory.data() + 4096,
                                [](std::byte each) { return each == std::byte{}; }));
        party.tell("end");
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
        std::byte source[4096];
        std::memset(source, 1, sizeof source);
        const LocalView view = view_of(*engine, source, sizeof source);
        TransferOptions options;
        options.notify = "tag";
        options.deadline_ns = in_seconds(-1);
        const TransferItem item{&view, &target};
        const Transfer transfer = engine->put({&item, 1}, options, in_seconds(30)).take();
        ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
        EXPECT_EQ(transfer.status().code(), Code::kCancelled);
        party.hear();
      });
}

KVZC_CONFORMANCE(CancelTest);

}  // namespace
}  // namespace kvzc::conformance

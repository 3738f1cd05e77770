// Full queues push back: nothing is posted, nothing is dropped, and room is found again.
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class BackpressureTest : public Conformance {};

constexpr std::uint32_t kDepth = 8;

void use_little_depth(EngineOptions& options) { options.tuning.arrival_depth = kDepth; }

Result<Transfer> try_tag(Engine& engine, const LocalView& source, const RemoteView& target,
                         std::string_view tag) {
  TransferOptions options;
  options.notify = tag;
  const TransferItem item{&source, &target};
  return engine.try_put({&item, 1}, options);
}

TEST_P(BackpressureTest, AFullInboxRefusesAndOneTakenTagMakesRoom) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine(use_little_depth);
        OwnedMemory memory = make_memory(*engine, 64);
        fill(memory.data(), 64, 1);
        party.tell(memory.handle_text());
        party.hear();
        // What was refused has not moved: the ninth byte is as it was.
        EXPECT_EQ(memory.data()[kDepth], pattern(kDepth, 1));
        EXPECT_EQ(engine->poll_arrivals(1).size(), 1u);
        party.meet();
        EXPECT_EQ(memory.data()[kDepth], std::byte{9});
        // Nothing was dropped: the other seven and the one that found room.
        std::size_t taken = 0;
        const std::int64_t patience = in_seconds(30);
        while (taken < kDepth && in_seconds(0) < patience)
          taken += engine->poll_arrivals(100).size();
        EXPECT_EQ(taken, kDepth);
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[1] = {std::byte{9}};
        const LocalView view = view_of(*engine, source, 1);
        ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
        for (std::uint32_t i = 0; i < kDepth; ++i) {
          ASSERT_TRUE(try_tag(*engine, view, slice(target, i, i + 1), "tag").is_ok()) << i;
        }
        const RemoteView ninth = slice(target, kDepth, kDepth + 1);
        EXPECT_EQ(try_tag(*engine, view, ninth, "tag").status().code(), Code::kWouldBlock);
        const std::int64_t patience = in_seconds(30);
        while (engine->stats().transfers_running != 0 && in_seconds(0) < patience) {
          std::this_thread::yield();
        }
        EXPECT_EQ(engine->stats().transfers_running, 0u);
        party.tell("full");
        party.hear();
        const Result<Transfer> again = try_tag(*engine, view, ninth, "tag");
        ASSERT_TRUE(again.is_ok()) << again.status().to_string();
        ASSERT_TRUE(again->wait(in_seconds(30)).is_ok());
        // One taken, room for one.
        EXPECT_EQ(try_tag(*engine, view, ninth, "tag").status().code(), Code::kWouldBlock);
        party.tell("ninth");
        party.hear();
      });
}

TEST_P(BackpressureTest, ABlockedPutTimesOutAndLaterGoesOnWhenTheInboxIsEmptied) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine(use_little_depth);
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        party.hear();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        EXPECT_EQ(engine->poll_arrivals(100).size(), kDepth);
        party.hear();
        EXPECT_TRUE(engine->wait_arrivals("late", 1, nullptr, in_seconds(30)).is_ok());
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = slice(open_handle(party.hear()), 0, 1);
        std::byte source[1] = {};
        const LocalView view = view_of(*engine, source, 1);
        ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
        for (std::uint32_t i = 0; i < kDepth; ++i) put_and_wait(*engine, view, target, "tag");
        TransferOptions options;
        options.notify = "late";
        const TransferItem item{&view, &target};
        EXPECT_EQ(engine->put({&item, 1}, options, in_seconds(0.02)).status().code(),
                  Code::kTimedOut);
        party.tell("full");
        // Woken by the owner's poll, long before this deadline.
        const Result<Transfer> transfer = engine->put({&item, 1}, options, in_seconds(30));
        ASSERT_TRUE(transfer.is_ok()) << transfer.status().to_string();
        party.tell("through");
        party.hear();
      });
}

TEST_P(BackpressureTest, MoreTagsThanTheRingHoldsAllArriveWithoutAnybodyPolling) {
  const int count = rounds(3000);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        party.hear();  // The writer is through, and nobody here has called anything meanwhile.
        std::size_t taken = 0;
        const std::int64_t patience = in_seconds(30);
        while (taken < static_cast<std::size_t>(count) && in_seconds(0) < patience) {
          taken += engine->poll_arrivals(1000).size();
        }
        EXPECT_EQ(taken, static_cast<std::size_t>(count));
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = slice(open_handle(party.hear()), 0, 1);
        std::byte source[1] = {};
        const LocalView view = view_of(*engine, source, 1);
        const std::string tag(200, 't');
        for (int i = 0; i < count; ++i) put_and_wait(*engine, view, target, tag);
        party.meet();
      });
}

TEST_P(BackpressureTest, AsManyTransfersRunAsTheEngineWasMadeFor) {
  constexpr std::int64_t kBytes = 16 << 20;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 11 * kBytes);
        party.tell(memory.handle_text());
        party.hear();
      },
      [&](Party& party) {
        auto engine = party.make_engine([](EngineOptions& options) { options.max_transfers = 2; });
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(*engine, source.data(), kBytes);
        ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
        std::vector<Transfer> transfers;
        bool was_refused = false;
        for (int i = 0; i < 10; ++i) {
          const RemoteView part = slice(target, i * kBytes, (i + 1) * kBytes);
          const TransferItem item{&view, &part};
          Result<Transfer> transfer = engine->try_put({&item, 1}, {});
          if (transfer.is_ok()) {
            transfers.push_back(transfer.take());
          } else {
            EXPECT_EQ(transfer.status().code(), Code::kWouldBlock);
            was_refused = true;
          }
          EXPECT_LE(engine->stats().transfers_running, 2u);
        }
        EXPECT_TRUE(was_refused);
        // One that waits for room gets it.
        const RemoteView part = slice(target, 10 * kBytes, 11 * kBytes);
        const TransferItem item{&view, &part};
        const std::int64_t at_most = in_seconds(10);
        Result<Transfer> last = engine->put({&item, 1}, {}, in_seconds(30));
        ASSERT_TRUE(last.is_ok()) << last.status().to_string();
        EXPECT_LT(in_seconds(0), at_most);  // Woken, not timed out.
        transfers.push_back(last.take());
        EXPECT_TRUE(wait_for(transfers, WaitFor::kAll, in_seconds(30)).is_ok());
        party.tell("end");
      });
}

TEST_P(BackpressureTest, ForgottenTagsGiveTheirRoomBack) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine(use_little_depth);
        OwnedMemory memory = make_memory(*engine, 64);
        engine->forget_arrivals("unwanted");
        party.tell(memory.handle_text());
        EXPECT_TRUE(engine->wait_arrivals("wanted", 1, nullptr, in_seconds(10)).is_ok());
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = slice(open_handle(party.hear()), 0, 1);
        std::byte source[1] = {};
        const LocalView view = view_of(*engine, source, 1);
        for (std::uint32_t i = 0; i < 3 * kDepth; ++i) {
          TransferOptions options;
          options.notify = "unwanted";
          const TransferItem item{&view, &target};
          ASSERT_TRUE(engine->put({&item, 1}, options, in_seconds(5)).is_ok()) << i;
        }
        put_and_wait(*engine, view, target, "wanted");
        party.hear();
      });
}

TEST_P(BackpressureTest, WhatWaitsForASilentPeerIsBoundedAndEndsInTime) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        party.hear();
      },
      [&](Party& party) {
        auto engine = party.make_engine(
            [](EngineOptions& options) { options.connect_timeout_seconds = 0.3; });
        const TestListener listener = listen_somewhere();  // Accepts nobody and says nothing.
        const RemoteView target = slice(at_address(open_handle(party.hear()), listener.address), 0, 1);
        std::byte source[1] = {};
        const LocalView view = view_of(*engine, source, 1);
        std::vector<Transfer> transfers;
        Code code = Code::kOk;
        while (code == Code::kOk && transfers.size() < 5000) {
          Result<Transfer> transfer = try_tag(*engine, view, target, "tag");
          code = transfer.status().code();
          if (transfer.is_ok()) transfers.push_back(transfer.take());
        }
        EXPECT_EQ(code, Code::kWouldBlock);
        EXPECT_GE(transfers.size(), 100u);
        ASSERT_TRUE(wait_for(transfers, WaitFor::kAll, in_seconds(10)).is_ok());
        for (const Transfer& transfer : transfers) {
          ASSERT_EQ(transfer.status().code(), Code::kTimedOut) << transfer.status().to_string();
        }
        EXPECT_EQ(engine->stats().transfers_running, 0u);
        party.tell("end");
      });
}

KVZC_CONFORMANCE(BackpressureTest);

}  // namespace
}  // namespace kvzc::conformance

// A tag arrives exactly once, after every byte of its transfer is readable.
#include <set>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class ArrivalTest : public Conformance {};

TEST_P(ArrivalTest, ATagIsSeenAfterAllBytesOfItsTransfer) {
  const int count = rounds(200);
  static constexpr std::uint64_t kMostBytes = 4 << 20;
  const auto size_of = [](int round) {
    // From a few bytes to many chunks, over and over.
    return std::min<std::uint64_t>(kMostBytes, 1 + (std::uint64_t{37} << (round % 18)));
  };
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kMostBytes);
        party.tell(memory.handle_text());
        for (int round = 0; round < count; ++round) {
          const std::string tag = "round " + std::to_string(round);
          auto arrivals = engine->wait_arrivals(tag, 1, nullptr, in_seconds(30));
          // Looked at from the last byte backwards, before anything else is done.
          const auto seed = static_cast<std::uint32_t>(round);
          for (std::uint64_t i = size_of(round); i > 0; --i) {
            ASSERT_EQ(memory.data()[i - 1], pattern(i - 1, seed)) << tag << " byte " << i - 1;
          }
          ASSERT_TRUE(arrivals.is_ok()) << arrivals.status().to_string();
          ASSERT_EQ((*arrivals)[0].code, Code::kOk);
          party.tell("next");
        }
        EXPECT_EQ(engine->stats().arrivals_arrived, static_cast<std::uint64_t>(count));
        EXPECT_EQ(engine->stats().arrivals_pending, 0u);
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kMostBytes);
        const LocalView view = view_of(*engine, source.data(), kMostBytes);
        for (int round = 0; round < count; ++round) {
          const auto size = static_cast<std::int64_t>(size_of(round));
          fill(source.data(), static_cast<std::uint64_t>(size), static_cast<std::uint32_t>(round));
          const std::string tag = "round " + std::to_string(round);
          put_and_wait(*engine, slice(view, 0, size), slice(target, 0, size), tag);
          party.hear();
        }
        party.hear();
      });
}

TEST_P(ArrivalTest, EveryTagOfManyThreadsArrivesOnce) {
  constexpr int kThreads = 3;
  const int per_thread = rounds(2000);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 4096);
        party.tell(memory.handle_text());
        std::set<std::string> seen;
        const std::size_t expected = static_cast<std::size_t>(kThreads * per_thread);
        const std::int64_t patience = in_seconds(60);
        while (seen.size() < expected && in_seconds(0) < patience) {
          for (const Arrival& arrival : engine->poll_arrivals(100)) {
            ASSERT_TRUE(seen.insert(arrival.tag).second) << arrival.tag << " came twice";
          }
        }
        EXPECT_EQ(seen.size(), expected);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT_TRUE(engine->poll_arrivals(100).empty());
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; ++t) {
          threads.emplace_back([&, t] {
            std::byte source[8] = {};
            const LocalView view = view_of(*engine, source, sizeof source);
            const RemoteView mine = slice(target, t * 8, t * 8 + 8);
            for (int i = 0; i < per_thread; ++i) {
              const std::string tag = std::to_string(t) + std::string(static_cast<std::size_t>(i % 200), '.') +
                                      std::to_string(i);
              put_and_wait(*engine, view, mine, tag);
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
        party.hear();
      });
}

TEST_P(ArrivalTest, AnEmptyPutBringsItsTag) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        EXPECT_TRUE(engine->wait_arrivals("empty", 1, nullptr, in_seconds(30)).is_ok());
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[8] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        put_and_wait(*engine, slice(view, 0, 0), slice(target, 0, 0), "empty");
        party.hear();
      });
}

TEST_P(ArrivalTest, TheTagOfAFailedTransferSaysSo) {
  constexpr std::uint64_t kBytes = 256 << 20;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory first = make_memory(*engine, kBytes);
        party.tell(first.handle_text());
        party.hear();
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        const Status closed = first.region.close(in_seconds(30));
        EXPECT_TRUE(closed.is_ok()) << closed.to_string();
        auto arrivals = engine->wait_arrivals("large", 1, nullptr, in_seconds(30));
        ASSERT_TRUE(arrivals.is_ok()) << arrivals.status().to_string();
        const std::string code = party.hear();
        EXPECT_EQ(std::string(code_name((*arrivals)[0].code)), code);
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(*engine, source.data(), kBytes);
        const LocalView little = slice(view, 0, 1);
        put_and_wait(*engine, little, slice(target, 0, 1));  // Connected.
        PutOptions options;
        options.notify = "large";
        const PutItem item{&view, &target};
        const Transfer transfer = engine->put({&item, 1}, options, in_seconds(30)).take();
        party.tell("started");
        ASSERT_TRUE(transfer.wait(in_seconds(60)).is_ok());
        party.tell(std::string(code_name(transfer.status().code())));
        party.hear();
      });
}

TEST_P(ArrivalTest, AForgottenTagIsDroppedAlsoWhenItComesLater) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        engine->forget_arrivals("late");
        party.tell(memory.handle_text());
        party.hear();
        EXPECT_TRUE(engine->wait_arrivals("wanted", 1, nullptr, in_seconds(30)).is_ok());
        engine->forget_arrivals("early");
        EXPECT_TRUE(engine->poll_arrivals(10).empty());
        EXPECT_EQ(engine->stats().arrivals_forgotten, 2u);
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[8] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        for (const char* tag : {"early", "late", "wanted"}) {
          put_and_wait(*engine, view, slice(target, 0, 8), tag);
        }
        party.tell("sent");
        party.hear();
      });
}

KVZC_CONFORMANCE(ArrivalTest);

}  // namespace
}  // namespace kvzc::conformance

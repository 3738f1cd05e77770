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
  const auto tag_of = [](int thread, int i) {
    return std::to_string(thread) + std::string(static_cast<std::size_t>(i % 200), '.') +
           std::to_string(i);
  };
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
        for (int t = 0; t < kThreads; ++t) {
          for (int i = 0; i < per_thread; ++i)
            ASSERT_TRUE(seen.contains(tag_of(t, i))) << tag_of(t, i);
        }
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
              put_and_wait(*engine, view, mine, tag_of(t, i));
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
        TransferOptions options;
        options.notify = "large";
        const TransferItem item{&view, &target};
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

TEST_P(ArrivalTest, TheTagOfATransferThatIsCancelledBeforeItBeganSaysSo) {
  const int count = rounds(10);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        for (int round = 0; round < count; ++round) {
          party.tell(memory.handle_text());
          const std::string code = party.hear();
          auto arrivals = engine->wait_arrivals("given up", 1, nullptr, in_seconds(10));
          ASSERT_TRUE(arrivals.is_ok()) << arrivals.status().to_string();
          EXPECT_EQ(std::string(code_name((*arrivals)[0].code)), code);
          party.tell("next");
          party.hear();
        }
      },
      [&](Party& party) {
        for (int round = 0; round < count; ++round) {
          auto engine = party.make_engine();  // Not connected: the put waits.
          const RemoteView target = open_handle(party.hear());
          std::byte source[64] = {};
          const LocalView view = view_of(*engine, source, sizeof source);
          TransferOptions options;
          options.notify = "given up";
          const TransferItem item{&view, &target};
          const Transfer transfer = engine->put({&item, 1}, options, in_seconds(30)).take();
          ASSERT_TRUE(transfer.cancel(in_seconds(30)).is_ok());
          party.tell(std::string(code_name(transfer.status().code())));
          party.meet();
        }
      });
}

TEST_P(ArrivalTest, WaitingForSeveralTakesAllOfThemOrNone) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        party.hear();
        EXPECT_EQ(engine->wait_arrivals("part", 3, nullptr, in_seconds(0.05)).status().code(),
                  Code::kTimedOut);
        EXPECT_EQ(engine->stats().arrivals_pending, 2u);
        party.meet();
        const auto arrivals = engine->wait_arrivals("part", 3, nullptr, in_seconds(30));
        ASSERT_TRUE(arrivals.is_ok()) << arrivals.status().to_string();
        EXPECT_EQ(arrivals->size(), 3u);
        EXPECT_EQ(engine->stats().arrivals_pending, 0u);
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[64] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        put_and_wait(*engine, view, target, "part");
        put_and_wait(*engine, view, target, "part");
        party.meet();
        put_and_wait(*engine, view, target, "part");
        party.tell("third");
        party.hear();
      });
}

TEST_P(ArrivalTest, AWaitForOnePeerLeavesTheTagsOfOthersAlone) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        party.hear();
        const auto first = engine->wait_arrivals("first", 1, nullptr, in_seconds(30));
        const auto second = engine->wait_arrivals("second", 1, nullptr, in_seconds(30));
        ASSERT_TRUE(first.is_ok() && second.is_ok());
        const auto wanted =
            engine->wait_arrivals("same", 1, (*second)[0].peer.get(), in_seconds(30));
        ASSERT_TRUE(wanted.is_ok()) << wanted.status().to_string();
        EXPECT_EQ((*wanted)[0].peer->engine_name, (*second)[0].peer->engine_name);
        EXPECT_EQ(engine->wait_arrivals("same", 1, (*second)[0].peer.get(), in_seconds(0.02))
                      .status()
                      .code(),
                  Code::kTimedOut);
        EXPECT_TRUE(
            engine->wait_arrivals("same", 1, (*first)[0].peer.get(), in_seconds(30)).is_ok());
        party.tell("end");
      },
      [&](Party& party) {
        auto one = party.make_engine();
        auto two = party.make_engine();
        const std::string text = party.hear();
        std::byte source[64] = {};
        put_and_wait(*one, view_of(*one, source, sizeof source), open_handle(text), "first");
        put_and_wait(*one, view_of(*one, source, sizeof source), open_handle(text), "same");
        put_and_wait(*two, view_of(*two, source, sizeof source), open_handle(text), "second");
        put_and_wait(*two, view_of(*two, source, sizeof source), open_handle(text), "same");
        party.meet();
      });
}

TEST_P(ArrivalTest, APollLeavesAloneWhatSomebodyWaitsFor) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        // For two, so that one stays.
        std::atomic<bool> is_waiting{false}, is_over{false};
        std::thread waiter([&] {
          const auto go_on = [&] {
            is_waiting = true;
            return !is_over;
          };
          const auto both = engine->wait_arrivals("expected", 2, nullptr, in_seconds(60), go_on);
          EXPECT_EQ(both.status().code(), Code::kTimedOut) << both.status().to_string();
        });
        while (!is_waiting) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        party.tell(memory.handle_text());
        party.hear();
        std::vector<Arrival> polled = engine->poll_arrivals(10);
        is_over = true;
        const std::int64_t at_most = in_seconds(20);
        waiter.join();
        EXPECT_LT(in_seconds(0), at_most);
        ASSERT_EQ(polled.size(), 1u);
        EXPECT_EQ(polled[0].tag, "other");
        polled = engine->poll_arrivals(10);
        ASSERT_EQ(polled.size(), 1u);
        EXPECT_EQ(polled[0].tag, "expected");
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[64] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        put_and_wait(*engine, view, target, "expected");
        put_and_wait(*engine, view, target, "other");
        party.meet();
      });
}

TEST_P(ArrivalTest, ATagThatNobodyTakesIsDroppedInTime) {
  run(
      [&](Party& party) {
        auto engine =
            party.make_engine([](EngineOptions& options) { options.arrival_ttl_seconds = 0.1; });
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        party.hear();
        const std::int64_t patience = in_seconds(5);
        while (engine->stats().arrivals_expired == 0 && in_seconds(0) < patience) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        EXPECT_EQ(engine->stats().arrivals_expired, 1u);
        EXPECT_EQ(engine->stats().arrivals_pending, 0u);
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[64] = {};
        put_and_wait(*engine, view_of(*engine, source, sizeof source), target, "left");
        party.meet();
      });
}

KVZC_CONFORMANCE(ArrivalTest);

}  // namespace
}  // namespace kvzc::conformance

// Everything may be called from every thread; ThreadSanitizer watches when it is asked to.
#include <atomic>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class ConcurrencyTest : public Conformance {};

TEST_P(ConcurrencyTest, ThreadsPutRegisterWaitPollAndCloseAtOnce) {
  const int count = rounds(60);
  constexpr std::int64_t kBytes = 200'000;
  constexpr int kWriters = 3;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kWriters * kBytes);
        party.tell(memory.handle_text());
        std::atomic<bool> is_over{false};
        // Between two waits for a tag nobody waits for it, and the poller may get it.
        std::atomic<int> taken{0};
        std::thread poller([&] {
          while (!is_over.load()) {
            for (const Arrival& arrival : engine->poll_arrivals(10))
              taken += arrival.tag == "waited";
            (void)engine->stats();
          }
        });
        std::thread registrar([&] {
          while (!is_over.load()) {
            OwnedMemory other = make_memory(*engine, 4096);
            (void)other.handle_text();
            EXPECT_TRUE(other.region.close(in_seconds(30)).is_ok());
          }
        });
        const std::int64_t patience = in_seconds(60);
        while (taken.load() < kWriters * count && in_seconds(0) < patience) {
          if (engine->wait_arrivals("waited", 1, nullptr, in_seconds(0.02)).is_ok()) ++taken;
        }
        EXPECT_EQ(taken.load(), kWriters * count);
        is_over.store(true);
        poller.join();
        registrar.join();
        party.meet();  // Their last puts come after their last tag that is counted.
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::thread> writers;
        for (int t = 0; t < kWriters; ++t) {
          writers.emplace_back([&, t] {
            std::vector<std::byte> source(kBytes);
            const LocalView view = view_of(*engine, source.data(), kBytes);
            const RemoteView mine = slice(target, t * kBytes, (t + 1) * kBytes);
            for (int i = 0; i < count; ++i) {
              put_and_wait(*engine, view, mine, "waited");
              put_and_wait(*engine, slice(view, 0, 64), slice(mine, 0, 64), "polled");
              (void)engine->stats();
            }
          });
        }
        for (std::thread& writer : writers) writer.join();
        party.meet();
      });
}

TEST_P(ConcurrencyTest, ManyThreadsReachAPeerAtOnceOverOneConnection) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 8 * 64);
        party.tell(memory.handle_text());
        party.hear();
        EXPECT_EQ(engine->stats().peers, 1u);
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const std::string text = party.hear();
        std::vector<std::thread> threads;
        for (int t = 0; t < 8; ++t) {
          threads.emplace_back([&, t] {
            std::byte source[64] = {};
            const RemoteView target = open_handle(text);  // Each its own handle.
            put_and_wait(*engine, view_of(*engine, source, 64),
                         slice(target, t * 64, (t + 1) * 64));
          });
        }
        for (std::thread& thread : threads) thread.join();
        EXPECT_EQ(engine->stats().peers, 1u);
        party.meet();
      });
}

TEST_P(ConcurrencyTest, GrantsOfOneOwnerAreReachedOverOneConnection) {
  constexpr int kGrants = 6;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        std::vector<OwnedMemory> memories;
        for (int i = 0; i < kGrants; ++i) {
          memories.push_back(make_memory(*engine, 64));
          party.tell(memories.back().handle_text());
        }
        party.hear();
        EXPECT_EQ(engine->stats().peers, 1u);
        party.tell("end");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        std::vector<std::string> texts;
        for (int i = 0; i < kGrants; ++i) texts.push_back(party.hear());
        std::vector<std::thread> threads;
        for (const std::string& text : texts) {
          threads.emplace_back([&engine, &text] {
            std::byte source[64] = {};
            put_and_wait(*engine, view_of(*engine, source, 64), open_handle(text));
          });
        }
        for (std::thread& thread : threads) thread.join();
        EXPECT_EQ(engine->stats().peers, 1u);
        party.meet();
      });
}

KVZC_CONFORMANCE(ConcurrencyTest);

}  // namespace
}  // namespace kvzc::conformance

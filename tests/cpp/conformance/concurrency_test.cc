// Everything may be called from every thread; ThreadSanitizer watches when it is asked to.
#include <atomic>
#include <thread>

#include "conformance/peer_group.h"
#include "kvzc/completion_queue.h"

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

// What each of sixteen threads does, round by round; two do the same.
TEST_P(ConcurrencyTest, SixteenThreadsPutGetWaitPollRegisterAndRevokeAtOnce) {
  constexpr int kThreads = 16;
  constexpr std::int64_t kBytes = 20'000;
  const int count = rounds(30);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kThreads * kBytes);
        party.tell(memory.handle_text());
        // Grants that end while the others write into them.
        OwnedMemory passing = make_memory(*engine, 2 * kBytes);
        std::vector<Grant> grants;
        for (int i = 0; i < count; ++i) {
          grants.push_back(engine->grant(*passing.region.view(), Access::kBoth).take());
          party.tell(text_of(grants.back()));
        }
        std::atomic<int> tags{0};
        std::atomic<bool> is_over{false};
        std::thread taker([&] {
          while (!is_over.load()) {
            tags += static_cast<int>(engine->poll_arrivals(100).size());
            (void)engine->peer_stats();
          }
          tags += static_cast<int>(engine->poll_arrivals(100'000).size());
        });
        for (const Grant& grant : grants) {
          EXPECT_TRUE(grant.revoke(in_seconds(60), Force::kNo).is_ok());
        }
        party.tell("revoked");
        EXPECT_EQ(party.hear(), "done");
        is_over.store(true);
        taker.join();
        EXPECT_EQ(tags.load(), 4 * count);
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<RemoteView> ending;
        for (int i = 0; i < count; ++i) ending.push_back(open_handle(party.hear()));
        const auto queue = CompletionQueue::create(8).take();
        const auto must = [](const Status& status) {
          EXPECT_TRUE(status.is_ok()) << status.to_string();
        };
        const auto start = [&](const LocalView& from, const RemoteView& to) {
          const TransferItem item{&from, &to};
          return engine->put({&item, 1}, {}, in_seconds(60));
        };
        const auto act = [&](int what, const LocalView& local, const RemoteView& mine) {
          const TransferItem item{&local, &mine};
          switch (what) {
            case 0:
            case 1:
              return put_and_wait(*engine, local, mine, "tag");
            case 2: {
              Result<Transfer> get = engine->get({&item, 1}, {}, in_seconds(60));
              must(get.status());
              must(get->wait(in_seconds(60)));
              return must(get->status());
            }
            case 3: {  // Through a queue that both of them take from.
              Result<CompletionQueue::Place> place = queue->reserve();
              if (!place.is_ok()) return;
              Result<Transfer> put = start(local, mine);
              must(put.status());
              place.take().fill(*put, nullptr);
              // Another may have taken it.
              const auto taken = queue->wait(1, in_seconds(0.2));
              EXPECT_TRUE(taken.is_ok() || taken.status().code() == Code::kTimedOut);
              return must(put->wait(in_seconds(60)));
            }
            case 4: {
              OwnedMemory own = make_memory(*engine, 4096);
              Grant grant = engine->grant(*own.region.view(), Access::kPut).take();
              (void)text_of(grant);
              must(grant.revoke(in_seconds(60), Force::kNo));
              return must(own.region.close(in_seconds(60)));
            }
            case 5: {
              Result<Transfer> put = start(local, mine);
              must(put.status());
              must(put->cancel(in_seconds(60)));
              EXPECT_TRUE(put->status().is_ok() || put->status().code() == Code::kCancelled);
              return;
            }
            case 6: {
              Result<Transfer> put = start(local, mine);
              if (put.is_ok()) must(put->wait(in_seconds(60)));
              const Code code = put.is_ok() ? put->status().code() : put.status().code();
              EXPECT_TRUE(code == Code::kOk || code == Code::kRevoked) << code_name(code);
              return;
            }
            default:
              (void)engine->stats();
              (void)engine->peer_stats();
              (void)engine->explain(target);
              (void)engine->catalog();
              (void)engine->wait_arrivals("nothing", 1, nullptr, in_seconds(0.001));
          }
        };
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; ++t) {
          threads.emplace_back([&, t] {
            std::vector<std::byte> bytes(kBytes);
            const LocalView local = view_of(*engine, bytes.data(), kBytes);
            const RemoteView mine = slice(target, t * kBytes, (t + 1) * kBytes);
            for (int i = 0; i < count; ++i) {
              const int what = t % 8, half = t / 8;
              const RemoteView passing = slice(ending[static_cast<std::size_t>(i)], half * kBytes,
                                               (half + 1) * kBytes);
              act(what, local, what == 6 ? passing : mine);
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
        EXPECT_EQ(party.hear(), "revoked");
        party.tell("done");
      });
}

KVZC_CONFORMANCE(ConcurrencyTest);

}  // namespace
}  // namespace kvzc::conformance

// Lives and identities: a new engine at an old address, two engines in one process, two regions
// over one storage.
#include <unistd.h>

#include <cstring>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class RestartTest : public Conformance {};

Status put(Engine& engine, const LocalView& source, const RemoteView& target) {
  const TransferItem item{&source, &target};
  const Result<Transfer> transfer = engine.put({&item, 1}, {}, in_seconds(30));
  if (!transfer.is_ok()) return transfer.status();
  if (Status waited = transfer->wait(in_seconds(30)); !waited.is_ok()) return waited;
  return transfer->status();
}

TEST_P(RestartTest, AnOldHandleNeverReachesTheNewEngineAtItsAddress) {
  const int count = rounds(10);
  const std::string name = "restarts-" + std::to_string(getpid());
  run(
      [&](Party& party) {
        std::string old;
        std::string listen;
        for (int round = 0; round < count; ++round) {
          auto engine =
              party.make_engine([&](EngineOptions& options) {
                options.name = name;
                if (!listen.empty()) options.listen = listen;
              });
          if (!engine->addresses().empty()) listen = engine->addresses()[0];
          OwnedMemory memory = make_memory(*engine, 4096);
          const std::string fresh = memory.handle_text();
          party.tell(old.empty() ? fresh : old);
          party.tell(fresh);
          party.hear();
          EXPECT_EQ(first_difference(memory.data(), 4096, static_cast<std::uint32_t>(round)), -1);
          old = fresh;
          ASSERT_TRUE(engine->close(in_seconds(30)).is_ok());
          party.tell("closed");
        }
      },
      [&](Party& party) {
        std::vector<std::byte> wrong(4096, std::byte{0xbb}), right(4096);
        auto engine = party.make_engine();
        const LocalView wrong_view = view_of(*engine, wrong.data(), 4096);
        const LocalView right_view = view_of(*engine, right.data(), 4096);
        for (int round = 0; round < count; ++round) {
          const RemoteView old = open_handle(party.hear());
          const RemoteView fresh = open_handle(party.hear());
          fill(right.data(), 4096, static_cast<std::uint32_t>(round));
          EXPECT_TRUE(put(*engine, right_view, fresh).is_ok());
          if (round > 0) {
            const Status status = put_until_answered(*engine, wrong_view, old);
            EXPECT_EQ(status.code(), Code::kStaleHandle) << status.to_string();
            // So does an engine that has not known the first life.
            auto stranger = party.make_engine();
            const Status stale = put(*stranger, view_of(*stranger, wrong.data(), 4096), old);
            EXPECT_EQ(stale.code(), Code::kStaleHandle) << stale.to_string();
          }
          party.tell("written");
          party.hear();
        }
      });
}

TEST_P(RestartTest, TwoEnginesOfOneProcessAreTwoPeers) {
  run(
      [](Party& party) {
        auto first = party.make_engine(), second = party.make_engine();
        OwnedMemory a = make_memory(*first, 4096), b = make_memory(*second, 4096);
        party.tell(a.handle_text());
        party.tell(b.handle_text());
        party.hear();
        // They are peers of each other as well.
        put_and_wait(*first, a.region.view().take(), open_handle(b.handle_text()), "moved");
        EXPECT_TRUE(second->wait_arrivals("moved", 1, nullptr, in_seconds(30)).is_ok());
        EXPECT_EQ(first_difference(b.data(), 4096, 1), -1);
        // The end of one is not the end of the other.
        ASSERT_TRUE(first->close(in_seconds(30)).is_ok());
        party.tell("closed");
        party.hear();
        EXPECT_EQ(first_difference(b.data(), 4096, 3), -1);
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView a = open_handle(party.hear()), b = open_handle(party.hear());
        std::vector<std::byte> source(4096);
        const LocalView view = view_of(*engine, source.data(), 4096);
        fill(source.data(), 4096, 1);
        put_and_wait(*engine, view, a);
        fill(source.data(), 4096, 2);
        put_and_wait(*engine, view, b);
        EXPECT_EQ(engine->stats().peers, 2u);
        party.tell("written");
        party.hear();
        const std::int64_t patience = in_seconds(5);
        while (engine->stats().peers != 1 && in_seconds(0) < patience) std::this_thread::yield();
        EXPECT_FALSE(put(*engine, view, a).is_ok());
        fill(source.data(), 4096, 3);
        put_and_wait(*engine, view, b);
        party.tell("end");
      });
}

TEST_P(RestartTest, TwoRegionsOverOneStorageCloseApart) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory first = make_memory(*engine, 4096);
        TensorSpec spec;
        spec.dtype = DType::kUint8;
        spec.shape = {4096};
        spec.strides_bytes = {1};
        spec.data = spec.storage_data = first.data();
        spec.storage_nbytes = 4096;
        spec.keep_alive = first.allocation;
        Region second = engine->register_memory({&spec, 1}).take();
        EXPECT_EQ(engine->stats().regions, 2u);
        EXPECT_EQ(engine->stats().storages, 1u);
        const Grant grant = engine->grant(second.view().take(), Access::kBoth).take();
        party.tell(first.handle_text());
        party.tell(text_of(grant));
        party.hear();
        ASSERT_TRUE(first.region.close(in_seconds(30)).is_ok());
        EXPECT_EQ(engine->stats().storages, 1u);
        party.tell("closed");
        party.hear();
        EXPECT_EQ(first_difference(first.data(), 4096, 2), -1);
        ASSERT_TRUE(second.close(in_seconds(30)).is_ok());
        EXPECT_EQ(engine->stats().storages, 0u);
        party.tell("closed too");
        party.hear();
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView first = open_handle(party.hear()), second = open_handle(party.hear());
        std::vector<std::byte> source(4096);
        const LocalView view = view_of(*engine, source.data(), 4096);
        fill(source.data(), 4096, 1);
        put_and_wait(*engine, view, first);
        put_and_wait(*engine, view, second);
        party.meet();
        EXPECT_EQ(put(*engine, view, first).code(), Code::kRevoked);
        fill(source.data(), 4096, 2);
        put_and_wait(*engine, view, second);
        party.meet();
        EXPECT_EQ(put(*engine, view, second).code(), Code::kRevoked);
        party.tell("end");
      });
}

KVZC_CONFORMANCE(RestartTest);

}  // namespace
}  // namespace kvzc::conformance

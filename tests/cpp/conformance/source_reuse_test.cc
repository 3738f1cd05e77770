// Done means that the source may be reused: it is scribbled over, then the target is checked.
#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class SourceReuseTest : public Conformance {};

TEST_P(SourceReuseTest, AScribbleAfterDoneDoesNotReachTheTarget) {
  const int count = rounds(20);
  constexpr std::uint64_t kBytes = 3 << 20;
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBytes);
        party.tell(memory.handle_text());
        for (int round = 0; round < count; ++round) {
          party.hear();
          ASSERT_EQ(first_difference(memory.data(), kBytes, static_cast<std::uint32_t>(round)), -1)
              << "round " << round;
          party.tell("next");
        }
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes);
        const LocalView view = view_of(*engine, source.data(), kBytes);
        for (int round = 0; round < count; ++round) {
          fill(source.data(), kBytes, static_cast<std::uint32_t>(round));
          put_and_wait(*engine, view, target);
          std::fill(source.begin(), source.end(), std::byte{0xee});
          party.tell("done");
          party.hear();
        }
      });
}

TEST_P(SourceReuseTest, TheSourceIsLetGoWhenItsLastByteIsReadAndBeforeTheEndIsTold) {
  const int count = rounds(30);
  constexpr std::uint64_t kBytes = 3 << 20;
  constexpr std::uint64_t kSmall = 4096;
  const auto size_of = [](int round) { return round % 2 == 0 ? kSmall : kBytes; };
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBytes);
        party.tell(memory.handle_text());
        for (int round = 0; round < count; ++round) {
          party.hear();
          const auto seed = static_cast<std::uint32_t>(round);
          ASSERT_EQ(first_difference(memory.data(), size_of(round), seed), -1) << "round " << round;
          party.tell("next");
        }
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBytes);
        for (int round = 0; round < count; ++round) {
          const std::uint64_t size = size_of(round);
          fill(source.data(), size, static_cast<std::uint32_t>(round));
          TensorSpec spec;
          spec.shape = {static_cast<std::int64_t>(size)};
          spec.strides_bytes = {1};
          spec.data = spec.storage_data = source.data();
          spec.storage_nbytes = size;
          // Whoever owns the memory gets it back here, and writes into it.
          spec.keep_alive = std::shared_ptr<void>(source.data(), [size](void* data) {
            std::fill_n(static_cast<std::byte*>(data), size, std::byte{0xee});
          });
          const std::weak_ptr<void> kept = spec.keep_alive;
          Transfer transfer;
          {
            const LocalView view = engine->find_or_borrow(spec).take();
            spec.keep_alive.reset();
            const RemoteView part = slice(target, 0, static_cast<std::int64_t>(size));
            const TransferItem item{&view, &part};
            transfer = engine->put({&item, 1}, {}, in_seconds(30)).take();
          }
          ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
          ASSERT_TRUE(kept.expired()) << "round " << round;
          ASSERT_TRUE(transfer.status().is_ok()) << transfer.status().to_string();
          party.tell("done");
          party.hear();
        }
      });
}

KVZC_CONFORMANCE(SourceReuseTest);

}  // namespace
}  // namespace kvzc::conformance

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

KVZC_CONFORMANCE(SourceReuseTest);

}  // namespace
}  // namespace kvzc::conformance

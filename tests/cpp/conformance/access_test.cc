// Who was granted to get cannot put, and the other way round, also when it does not ask: for
// transports on which the owner's side enforces it.
#include <cstring>
#include <vector>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class AccessTest : public Conformance {
 protected:
  // The holder writes "put and get" into the handle of a grant that says less.
  void overstep(Access granted) {
    constexpr std::uint64_t kBytes = 65536;
    run(
        [&](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, kBytes);
          fill(memory.data(), kBytes, 1);
          const LocalView view = memory.region.view().take();
          const Grant grant = engine->grant(view, granted).take();
          party.tell(text_of(grant));
          // Other grants of the same memory change nothing.
          const Grant get = engine->grant(view, Access::kGet).take();
          const Grant put = engine->grant(view, Access::kPut).take();
          party.tell(text_of(granted == Access::kGet ? put : get));
          party.hear();
          EXPECT_EQ(first_difference(memory.data(), kBytes, 1), -1);
          party.tell("seen");
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          HandleInfo info = open_handle(party.hear()).handle->info;
          info.access = Access::kBoth;
          const RemoteView forged = handle_of(info);
          const RemoteView other = open_handle(party.hear());
          std::vector<std::byte> local(kBytes, std::byte{0xcc});
          const LocalView view = view_of(*engine, local.data(), kBytes);
          ASSERT_TRUE(engine->connect(other)->wait(in_seconds(30)).is_ok());
          // What was granted works.
          const TransferItem item{&view, &forged};
          const auto move = [&](Direction direction) {
            const Transfer transfer =
                (direction == Direction::kPut ? engine->put({&item, 1}, {}, in_seconds(30))
                                              : engine->get({&item, 1}, {}, in_seconds(30)))
                    .take();
            EXPECT_TRUE(transfer.wait(in_seconds(30)).is_ok());
            return transfer.status();
          };
          if (granted == Access::kGet) {
            EXPECT_TRUE(move(Direction::kGet).is_ok());
            EXPECT_EQ(first_difference(local.data(), kBytes, 1), -1);
            fill(local.data(), kBytes, 2);
            EXPECT_FALSE(move(Direction::kPut).is_ok());
          } else {
            fill(local.data(), kBytes, 1);
            EXPECT_TRUE(move(Direction::kPut).is_ok());
            fill(local.data(), kBytes, 2);
            EXPECT_FALSE(move(Direction::kGet).is_ok());
            EXPECT_EQ(first_difference(local.data(), kBytes, 2), -1);
          }
          party.meet();
        });
  }
};

TEST_P(AccessTest, AGrantToGetTakesNoPut) { overstep(Access::kGet); }
TEST_P(AccessTest, AGrantToPutGivesNoByte) { overstep(Access::kPut); }

std::vector<Case> enforcing_cases() {
  std::vector<Case> out;
  for (const Case& each : all_cases()) {
    if (each.sut.is_remote) out.push_back(each);
  }
  return out;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AccessTest);
INSTANTIATE_TEST_SUITE_P(, AccessTest, ::testing::ValuesIn(enforcing_cases()), case_name);

}  // namespace
}  // namespace kvzc::conformance

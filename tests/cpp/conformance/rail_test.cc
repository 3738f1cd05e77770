// A rail that goes down in a stream of puts: nothing is lost, nothing comes twice, nothing hangs.
//
// It takes an interface down, so it runs only on a machine that was made for it: a guest of
// tests/softroce.

#include <stdlib.h>

#include <cstring>
#include <vector>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

constexpr std::uint64_t kBytes = 1 << 20;  // Striped over both.
constexpr int kPuts = 24;

void set_link(int rail, const char* state) {
  const std::string command = "ip link set roce" + std::to_string(rail) + " " + state;
  ASSERT_EQ(std::system(command.c_str()), 0) << command;  // NOLINT: no other thread minds.
}

class RailTest : public Conformance {
 protected:
  void TearDown() override {
    for (int rail : {0, 1}) set_link(rail, "up");
  }

  void lose_a_rail(int rail, bool is_while_posted) {
    run(
        [](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, kPuts * kBytes);
          party.tell(memory.handle_text());
          for (int i = 0; i < kPuts; ++i) {
            const std::string tag = "put " + std::to_string(i);
            const auto arrived = engine->wait_arrivals(tag, 1, nullptr, in_seconds(60));
            ASSERT_TRUE(arrived.is_ok()) << arrived.status().to_string();
            ASSERT_EQ((*arrived)[0].code, Code::kOk);
            const auto seed = static_cast<std::uint32_t>(i);
            ASSERT_EQ(first_difference(memory.data() + i * kBytes, kBytes, seed), -1) << tag;
          }
          party.hear();
          EXPECT_TRUE(engine->poll_arrivals(100).empty()) << "a tag came twice";
          EXPECT_TRUE(memory.region.close(in_seconds(30)).is_ok());
          party.tell("closed");
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          const RemoteView target = open_handle(party.hear());
          std::vector<std::byte> source(kPuts * kBytes);
          for (int i = 0; i < kPuts; ++i) {
            fill(source.data() + i * kBytes, kBytes, static_cast<std::uint32_t>(i));
          }
          const LocalView whole = view_of(*engine, source.data(), source.size());
          ASSERT_TRUE(engine->connect(target)->wait(in_seconds(30)).is_ok());
          std::vector<Transfer> running;
          for (int i = 0; i < kPuts; ++i) {
            if (i == kPuts / 3) set_link(rail, "down");
            const auto begin = static_cast<std::int64_t>(i * kBytes);
            const LocalView from = slice(whole, begin, begin + static_cast<std::int64_t>(kBytes));
            const RemoteView to = slice(target, begin, begin + static_cast<std::int64_t>(kBytes));
            const TransferItem item{&from, &to};
            const std::string tag = "put " + std::to_string(i);
            TransferOptions options;
            options.notify = tag;
            Result<Transfer> put = engine->put({&item, 1}, options, in_seconds(60));
            ASSERT_TRUE(put.is_ok()) << put.status().to_string();
            running.push_back(put.take());
            if (!is_while_posted) {
              ASSERT_TRUE(running.back().wait(in_seconds(60)).is_ok());
            }
          }
          for (const Transfer& each : running) {
            ASSERT_TRUE(each.wait(in_seconds(60)).is_ok());
            EXPECT_TRUE(each.status().is_ok()) << each.status().to_string();
          }
          party.tell("all");
          party.hear();
        });
  }
};

TEST_P(RailTest, TheSecondMayGoDownInAStream) { lose_a_rail(1, true); }
TEST_P(RailTest, TheFirstMayGoDownInAStream) { lose_a_rail(0, true); }
TEST_P(RailTest, TheFirstMayGoDownBetweenPuts) { lose_a_rail(0, false); }

std::vector<Case> rail_cases() {
  std::vector<Case> out;
  if (getenv("KVZC_SOFTROCE") == nullptr) return out;
  for (const Case& each : process_cases()) {
    if (each.sut.name.starts_with("rdma")) out.push_back(each);
  }
  return out;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RailTest);
INSTANTIATE_TEST_SUITE_P(, RailTest, ::testing::ValuesIn(rail_cases()), case_name);

}  // namespace
}  // namespace kvzc::conformance

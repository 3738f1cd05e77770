#include "kvzc/status.h"

#include <errno.h>

#include <set>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

TEST(Status, GivesEachCodeItsOwnNameAndNumber) {
  std::set<std::string_view> names;
  for (int number = 0; number <= static_cast<int>(Code::kSystem); ++number) {
    const auto code = static_cast<Code>(number);
    EXPECT_EQ(code_from_wire(static_cast<std::uint8_t>(number)),
              code == Code::kWouldBlock ? Code::kProtocol : code);
    EXPECT_NE(code_name(code), "Unknown");
    EXPECT_TRUE(names.insert(code_name(code)).second) << code_name(code);
  }
  EXPECT_EQ(code_name(Code::kOk), "Ok");
  EXPECT_EQ(code_name(Code::kPeerLost), "PeerLost");
}

// The numbers travel: a list that was reordered would make two versions misunderstand each other.
TEST(Status, KeepsTheNumbersThatTravel) {
  EXPECT_EQ(static_cast<int>(Code::kInvalidArgument), 1);
  EXPECT_EQ(static_cast<int>(Code::kBadHandle), 4);
  EXPECT_EQ(static_cast<int>(Code::kRevoked), 7);
  EXPECT_EQ(static_cast<int>(Code::kPeerLost), 11);
  EXPECT_EQ(static_cast<int>(Code::kSystem), 19);
}

TEST(Status, TakesANumberThatIsNoCodeForABreachOfProtocol) {
  for (int number = static_cast<int>(Code::kSystem) + 1; number < 256; ++number) {
    EXPECT_EQ(code_from_wire(static_cast<std::uint8_t>(number)), Code::kProtocol) << number;
  }
}

TEST(Status, SaysItsNameAndText) {
  EXPECT_TRUE(Status().is_ok());
  EXPECT_EQ(Status::ok().text(), "");
  EXPECT_EQ(Status(Code::kTimedOut, "after 2 s").to_string(), "TimedOut: after 2 s");
  const Status system = Status::system(ENOENT, "open");
  EXPECT_EQ(system.code(), Code::kSystem);
  EXPECT_EQ(system.text(), "open: No such file or directory (errno 2)");
}

TEST(Result, HoldsAValueOrTheReasonWhyThereIsNone) {
  Result<std::string> good(std::string("value"));
  EXPECT_TRUE(good.is_ok());
  EXPECT_TRUE(good.status().is_ok());
  EXPECT_EQ(good->size(), 5u);
  EXPECT_EQ(good.take(), "value");
  const Result<std::string> bad(Status(Code::kClosed, "closed"));
  EXPECT_FALSE(bad.is_ok());
  EXPECT_EQ(bad.status().code(), Code::kClosed);
}

}  // namespace
}  // namespace kvzc

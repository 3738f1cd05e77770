#include "base/fence_board.h"

#include <limits>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

using test::Child;

FenceBoard must_create(std::uint32_t slots) {
  Result<FenceBoard> board = FenceBoard::create(slots);
  EXPECT_TRUE(board.is_ok()) << board.status().to_string();
  return board.is_ok() ? board.take() : FenceBoard();
}

TEST(FenceBoard, BeginsWithEveryEpochAtZero) {
  const FenceBoard board = must_create(1000);
  ASSERT_EQ(board.slots(), 1000u);
  for (std::uint32_t slot = 0; slot < board.slots(); ++slot) EXPECT_EQ(board.epoch(slot), 0u);
}

TEST(FenceBoard, KeepsEachEpochApart) {
  FenceBoard board = must_create(100);
  for (std::uint32_t slot = 0; slot < 100; ++slot) {
    board.set_epoch(slot, std::numeric_limits<std::uint64_t>::max() - slot);
  }
  for (std::uint32_t slot = 0; slot < 100; ++slot) {
    EXPECT_EQ(board.epoch(slot), std::numeric_limits<std::uint64_t>::max() - slot);
  }
}

TEST(FenceBoard, ShowsAPeerWhatItsOwnerSets) {
  FenceBoard owner = must_create(64);
  Result<OwnedFd> fd = owner.share();
  ASSERT_TRUE(fd.is_ok()) << fd.status().to_string();
  Result<FenceBoard> peer = FenceBoard::open(std::move(*fd), 64);
  ASSERT_TRUE(peer.is_ok()) << peer.status().to_string();
  EXPECT_EQ(peer->slots(), 64u);
  owner.set_epoch(0, 2);
  owner.set_epoch(63, 3);
  EXPECT_EQ(peer->epoch(0), 2u);
  EXPECT_EQ(peer->epoch(63), 3u);
  // Also across processes.
  Child child([&] {
    KVZC_CHILD_CHECK(peer->epoch(63) == 3);
    owner.set_epoch(62, 5);
    return 0;
  });
  EXPECT_EQ(child.wait(), "exit 0");
  EXPECT_EQ(peer->epoch(62), 5u);
}

TEST(FenceBoard, CannotBeWrittenByAPeer) {
  FenceBoard owner = must_create(64);
  Result<OwnedFd> fd = owner.share();
  ASSERT_TRUE(fd.is_ok());
  Result<FenceBoard> peer = FenceBoard::open(std::move(*fd), 64);
  ASSERT_TRUE(peer.is_ok());
  Child child([&] {
    signal(SIGSEGV, SIG_DFL);
    peer->set_epoch(0, 1);
    return 0;
  });
  EXPECT_EQ(child.wait(), "signal " + std::to_string(SIGSEGV));
  EXPECT_EQ(owner.epoch(0), 0u);
}

TEST(FenceBoard, RefusesABoardThatHasFewerSlotsThanAnnounced) {
  FenceBoard owner = must_create(64);
  for (const std::uint32_t slots : {0u, 65u, 1000u, 0x20000000u, 0xffffffffu}) {
    Result<OwnedFd> fd = owner.share();
    ASSERT_TRUE(fd.is_ok());
    EXPECT_EQ(FenceBoard::open(std::move(*fd), slots).status().code(), Code::kProtocol) << slots;
  }
}

TEST(FenceBoard, RefusesToBeMadeWithoutSlots) {
  EXPECT_EQ(FenceBoard::create(0).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace kvzc

#include "base/fence_board.h"

namespace kvzc {

Result<FenceBoard> FenceBoard::create(std::uint32_t slots) {
  Result<SharedMemory> memory =
      SharedMemory::create("kvzc-fences", std::uint64_t{slots} * sizeof(Epoch), MapAccess::kRead);
  if (!memory.is_ok()) return memory.status();
  FenceBoard out;
  out.memory_ = memory.take();
  return out;
}

Result<FenceBoard> FenceBoard::open(OwnedFd fd, std::uint32_t slots) {
  if (slots == 0) return Status(Code::kProtocol, "the peer announced a fence board of 0 slots");
  Result<SharedMemory> memory =
      SharedMemory::map(std::move(fd), std::uint64_t{slots} * sizeof(Epoch), MapAccess::kRead);
  if (!memory.is_ok()) return memory.status();
  FenceBoard out;
  out.memory_ = memory.take();
  out.memory_.close_fd();
  return out;
}

}  // namespace kvzc

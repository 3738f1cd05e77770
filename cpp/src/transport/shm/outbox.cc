#include "transport/shm/outbox.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvzc::shm {

Result<Outbox> Outbox::create(std::uint32_t ring_bytes) {
  Result<SharedMemory> memory =
      SharedMemory::create("kvzc-outbox", sizeof(OutboxPage) + ring_bytes);
  if (!memory.is_ok()) return memory.status();
  Outbox out;
  out.memory_ = memory.take();
  out.ring_bytes_ = ring_bytes;
  return out;
}

Result<Outbox> Outbox::open(OwnedFd fd, std::uint32_t ring_bytes) {
  if (!std::has_single_bit(ring_bytes) || ring_bytes < 4096 || ring_bytes > (1u << 30)) {
    return Status(Code::kProtocol,
                  "the peer announced a tag ring of " + std::to_string(ring_bytes) + " bytes");
  }
  Result<SharedMemory> memory =
      SharedMemory::map(std::move(fd), sizeof(OutboxPage) + ring_bytes, MapAccess::kReadWrite);
  if (!memory.is_ok()) return memory.status();
  Outbox out;
  out.memory_ = memory.take();
  out.memory_.close_fd();
  out.ring_bytes_ = ring_bytes;
  return out;
}

void Outbox::write(std::uint64_t at, const void* bytes, std::size_t nbytes) const {
  const std::size_t start = at & (ring_bytes_ - 1);
  const std::size_t first = std::min<std::size_t>(nbytes, ring_bytes_ - start);
  std::memcpy(page().ring() + start, bytes, first);
  std::memcpy(page().ring(), static_cast<const std::byte*>(bytes) + first, nbytes - first);
}

void Outbox::read(std::uint64_t at, void* bytes, std::size_t nbytes) const {
  const std::size_t start = at & (ring_bytes_ - 1);
  const std::size_t first = std::min<std::size_t>(nbytes, ring_bytes_ - start);
  std::memcpy(bytes, page().ring() + start, first);
  std::memcpy(static_cast<std::byte*>(bytes) + first, page().ring(), nbytes - first);
}

}  // namespace kvzc::shm

#include "base/doorbell.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>

#include "base/futex.h"

namespace kvzc {

struct Doorbell::Page {
  alignas(64) std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> armed;
};

Result<Doorbell> Doorbell::create() {
  Result<SharedMemory> memory = SharedMemory::create("kvzc-doorbell", sizeof(Page));
  if (!memory.is_ok()) return memory.status();
  Doorbell out;
  out.memory_ = memory.take();
  out.event_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!out.event_.is_valid()) return Status::system(errno, "eventfd");
  return out;
}

Result<Doorbell> Doorbell::open(OwnedFd memory, OwnedFd event) {
  // So that whoever rings does not wait for what the peer has left unread in it. (A peer that changes it
  // afterwards harms who rings: on one host a peer with a grant is trusted.)
  const int flags = fcntl(event.get(), F_GETFL);
  if (flags < 0 || (flags & O_NONBLOCK) == 0) {
    return Status(Code::kProtocol, "the peer's event descriptor makes those wait who write to it");
  }
  Result<SharedMemory> mapped =
      SharedMemory::map(std::move(memory), sizeof(Page), MapAccess::kReadWrite);
  if (!mapped.is_ok()) return mapped.status();
  Doorbell out;
  out.memory_ = mapped.take();
  out.memory_.close_fd();
  out.event_ = std::move(event);
  return out;
}

Status Doorbell::share(OwnedFd* memory, OwnedFd* event) const {
  Result<OwnedFd> memory_copy = duplicate(memory_.fd());
  if (!memory_copy.is_ok()) return memory_copy.status();
  Result<OwnedFd> event_copy = duplicate(event_.get());
  if (!event_copy.is_ok()) return event_copy.status();
  *memory = memory_copy.take();
  *event = event_copy.take();
  return Status::ok();
}

void Doorbell::ring() const {
  Page& p = *page();
  p.rings.fetch_add(1, std::memory_order_seq_cst);
  // Sequentially consistent on both sides: either this sees the sleeper, or the sleeper sees the
  // new count and does not sleep.
  if (p.sleepers.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(p.rings, FutexScope::kShared);
  }
  if (p.armed.load(std::memory_order_seq_cst) != 0 && p.armed.exchange(0) != 0) set_event();
}

std::uint32_t Doorbell::count() const { return page()->rings.load(std::memory_order_seq_cst); }

void Doorbell::sleep(std::uint32_t seen, std::int64_t timeout_ns) const {
  Page& p = *page();
  p.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (p.rings.load(std::memory_order_seq_cst) == seen) {
    futex_wait(p.rings, seen, timeout_ns, FutexScope::kShared);
  }
  p.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Doorbell::arm_event() const { page()->armed.store(1, std::memory_order_seq_cst); }

bool Doorbell::is_event_armed() const {
  return page()->armed.load(std::memory_order_seq_cst) != 0;
}

void Doorbell::set_event() const {
  const std::uint64_t one = 1;
  // EAGAIN means that it is readable already, which is all that is wanted.
  [[maybe_unused]] const ssize_t written = write(event_.get(), &one, sizeof one);
}

void Doorbell::clear_event() const {
  std::uint64_t value;
  [[maybe_unused]] const ssize_t got = read(event_.get(), &value, sizeof value);
}

}  // namespace kvzc

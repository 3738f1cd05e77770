// What a transport under a fuzzer is lent, and memory as a peer may send it.
#pragma once

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "base/doorbell.h"
#include "base/fence_board.h"
#include "fuzz/target.h"
#include "kvzc/transport.h"
#include "transport/shm/outbox.h"

namespace kvzc::fuzz {

inline OwnedFd make_memory(std::uint64_t nbytes, int seals = F_SEAL_SHRINK | F_SEAL_GROW) {
  OwnedFd fd(memfd_create("kvzc-fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  KVZC_FUZZ_CHECK(ftruncate(fd.get(), static_cast<off_t>(nbytes)) == 0);
  if (seals != 0) KVZC_FUZZ_CHECK(fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

inline constexpr std::uint32_t kRingBytes = 4096;
inline constexpr std::uint32_t kSlots = 64;

// Descriptors of the right kind and of wrong ones.
class SomeFds {
 public:
  SomeFds() {
    all_[0] = make_memory(sizeof(shm::OutboxPage) + kRingBytes);
    all_[1] = make_memory(192);
    all_[2] = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    all_[3] = make_memory(8 * kSlots);
    all_[4] = make_memory(1 << 16, 0);
    all_[5] = make_memory(1 << 16, F_SEAL_SHRINK | F_SEAL_WRITE);
    all_[6] = OwnedFd(open("/dev/null", O_RDWR | O_CLOEXEC));
    all_[7] = make_memory(1 << 20);
    int ends[2];
    KVZC_FUZZ_CHECK(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
    all_[8] = OwnedFd(ends[0]);
    all_[9] = OwnedFd(ends[1]);
  }
  OwnedFd pick(std::uint8_t which) const {
    return OwnedFd(fcntl(all_[which % all_.size()].get(), F_DUPFD_CLOEXEC, 0));
  }

 private:
  std::array<OwnedFd, 10> all_;
};

// An engine's part, as far as a transport sees it.
class Host final : public OperationSink, public PeerSink {
 public:
  explicit Host(TransportTuning tuning = {})
      : doorbell(must(Doorbell::create())),
        fences(must(FenceBoard::create(kSlots))),
        lent{doorbell, fences, *this, *this, tuning} {}

  void retire(Operation&, Status) override { KVZC_FUZZ_CHECK(false && "nothing was posted"); }
  void retain(Operation& operation) override { operation.retain(); }
  void release(Operation& operation) override { (void)operation.release(); }
  void arrived(std::uint64_t, std::string_view tag, Code code) override {
    arrivals.emplace_back(tag, code);
  }
  void channel_lost(std::uint64_t) override {}

  template <typename T>
  static T must(Result<T> made) {
    KVZC_FUZZ_CHECK(made.is_ok());
    return made.take();
  }

  Doorbell doorbell;
  FenceBoard fences;
  TransportHost lent;
  std::vector<std::pair<std::string, Code>> arrivals;
};

}  // namespace kvzc::fuzz

#include "transport/rdma/registration.h"

#include <errno.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace kvzc::rdma {
namespace {

int flags_of(Access access) {
  return IBV_ACCESS_LOCAL_WRITE | (access != Access::kGet ? IBV_ACCESS_REMOTE_WRITE : 0) |
         (access != Access::kPut ? IBV_ACCESS_REMOTE_READ : 0);
}

// A multiple of every page size, so that parts begin at the bounds of pages.
constexpr std::uint64_t kPartUnit = std::uint64_t{1} << 30;

constexpr int kDeregisterTries = 3;

std::uint64_t part_limit(std::uint64_t device_limit) {
  if (device_limit == 0) return UINT64_MAX;
  return device_limit < kPartUnit ? device_limit : device_limit / kPartUnit * kPartUnit;
}

// Gives the NUMA node of a page that is there, or -1.
int node_of(std::byte* address) {
  void* page = address;
  int node = -1;
  const long asked = syscall(SYS_move_pages, 0, 1UL, &page, nullptr, &node, 0);
  return asked == 0 ? node : -1;
}

Status why_not(int error, const std::string& device, std::uint64_t nbytes) {
  const std::string asked =
      "registering " + std::to_string(nbytes) + " bytes with " + device + ": " + std::strerror(error);
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  if ((error == ENOMEM || error == EAGAIN || error == EPERM) && limit.rlim_cur != RLIM_INFINITY) {
    return Status(Code::kLimitExceeded,
                  asked + ". All of it is pinned, and RLIMIT_MEMLOCK allows " +
                      std::to_string(limit.rlim_cur) +
                      " bytes in this process: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity "
                      "in systemd, --ulimit memlock=-1 in Docker)");
  }
  if (error == ENOMEM || error == EAGAIN) {
    return Status(Code::kLimitExceeded, asked +
                                            ". All of it is pinned: there must be that much memory, "
                                            "and a free memory region on the device");
  }
  if (error == EFAULT) {
    return Status(Code::kTransportUnavailable,
                  asked + ". The kernel cannot pin this memory (read-only, a file of a file system "
                          "that forbids it, or device memory); copy it to memory of kvzc.empty()");
  }
  return Status::system(error, asked);
}

}  // namespace

Result<std::shared_ptr<Registration>> Registration::make(const std::shared_ptr<Device>& device,
                                                         const MemoryPiece& piece,
                                                         Access access) {
  std::shared_ptr<Registration> out(new Registration(device));
  out->data_ = piece.data;
  out->part_bytes_ = part_limit(device->limits().max_mr_size);
  for (std::uint64_t at = 0; at < piece.nbytes; at += out->part_bytes_) {
    const std::uint64_t nbytes = std::min(out->part_bytes_, piece.nbytes - at);
    errno = 0;
    ibv_mr* part = device->verbs().reg_mr(device->domain(), piece.data + at,
                                          static_cast<std::size_t>(nbytes),
                                 flags_of(access));
    if (part == nullptr) return why_not(errno, device->info().name, piece.nbytes);
    out->parts_.push_back(part);
    if (out->part_bytes_ > piece.nbytes - at) break;  // The sum might wrap.
  }
  // It is pinned now. Where it lies does not change any more, and the first page stands for all.
  const int node = node_of(piece.data);
  const int device_node = device->info().numa_node;
  out->is_near_ = node < 0 || device_node < 0 || node == device_node;
  return out;
}

Result<std::shared_ptr<Registration>> Registration::make_of_dmabuf(
    const std::shared_ptr<Device>& device, int dmabuf, std::uint64_t nbytes) {
  const ibv::Verbs& verbs = device->verbs();
  if (verbs.reg_dmabuf_mr == nullptr) {
    return Status(Code::kUnsupported,
                  "device memory: this libibverbs has no ibv_reg_dmabuf_mr; install rdma-core 34 or "
                  "later");
  }
  std::shared_ptr<Registration> out(new Registration(device));
  out->part_bytes_ = UINT64_MAX;
  ibv_mr* part = verbs.reg_dmabuf_mr(device->domain(), 0, static_cast<std::size_t>(nbytes), 0, dmabuf,
                                      flags_of(Access::kBoth));
  if (part == nullptr) {
    return Status(Code::kUnsupported,
                  "device memory: " + device->info().name + " does not take a dma-buf (" +
                      std::strerror(errno) +
                      "); it needs Linux 5.12, a driver that can (mlx5, irdma, bnxt_re, efa), and "
                      "peer-to-peer access between the two devices");
  }
  out->parts_.push_back(part);
  return out;
}

Result<std::shared_ptr<Registration>> Registration::of(const std::shared_ptr<Device>& device,
                                                       const MemoryPiece& piece, Access access) {
  if (piece.registrations == nullptr) return make(device, piece, access);
  return piece.registrations->find_or_make<Registration>(
      device.get(), access, [&] { return make(device, piece, access); });
}

Registration::~Registration() {
  for (ibv_mr* part : parts_) {
    // Who refuses is busy or was interrupted; what stays registered may be written by whoever knows
    // its key.
    for (int tries = 0; tries < kDeregisterTries; ++tries) {
      if (device_->verbs().dereg_mr(part) == 0) break;
    }
  }
}

}  // namespace kvzc::rdma

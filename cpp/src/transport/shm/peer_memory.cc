#include "transport/shm/peer_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <string>

#include "base/process.h"

namespace kvzc::shm {
namespace {

// Vectors of one call. More would be allowed; the time of a call is bounded by its bytes.
constexpr std::size_t kMostVectors = 64;

constexpr const char* kRemedy =
    "Allocate the memory with kvzc.empty(shape, dtype), or move it with kvzc.share(tensor), which "
    "needs no such right";

// A number in a file of one line; -1 when there is none.
int read_number(const char* path) {
  std::ifstream file(path);
  int value = -1;
  file >> value;
  return file ? value : -1;
}

bool has_seccomp_filter() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Seccomp:")) return line.find('2') != std::string::npos;
  }
  return false;
}

// Why the kernel refused, as far as it can be seen from here.
std::string reason_for(int error_number, const PeerProcess& owner) {
  if (error_number == ENOSYS) {
    return has_seccomp_filter()
               ? "a seccomp filter of this process (a container's, for instance) forbids "
                 "process_vm_writev; allow it there"
               : "this kernel lacks process_vm_writev (CONFIG_CROSS_MEMORY_ATTACH)";
  }
  if (owner.uid != geteuid() && geteuid() != 0) {
    return "the owner runs as user id " + std::to_string(owner.uid) + ", this process as " +
           std::to_string(geteuid()) + "; run both as one user, or this one with CAP_SYS_PTRACE";
  }
  const int ptrace_scope = read_number("/proc/sys/kernel/yama/ptrace_scope");
  if (ptrace_scope > 0) {
    return "the kernel's ptrace_scope is " + std::to_string(ptrace_scope) +
           "; set kernel.yama.ptrace_scope=0, have the owner call prctl(PR_SET_PTRACER), or give "
           "this process CAP_SYS_PTRACE";
  }
  struct stat info;
  // The files below it belong to root when the process is not dumpable; the folder itself does not.
  const std::string process = "/proc/" + std::to_string(owner.pid) + "/stat";
  if (stat(process.c_str(), &info) == 0 && info.st_uid != owner.uid) {
    return "the owner's process is not dumpable (prctl(PR_SET_DUMPABLE, 0), or a set-user-id "
           "program), so that others may not reach into it";
  }
  if (has_seccomp_filter()) {
    return "a seccomp filter of this process (a container's, for instance) may forbid "
           "process_vm_writev; allow it there";
  }
  return "the owner has capabilities or a user namespace that this process lacks; give it "
         "CAP_SYS_PTRACE";
}

Status refused(int error_number, const PeerProcess& owner) {
  return Status(Code::kTransportUnavailable,
                "shm: the memory is private to process " + std::to_string(owner.pid) +
                    ", and the kernel does not let this process copy there (" +
                    std::string(Status::system(error_number, "process_vm_readv").text()) + "): " +
                    reason_for(error_number, owner) + ". " + kRemedy);
}

}  // namespace

int OtherProcessMemory::look_at_owner() const {
  if (owner_.pidfd >= 0 && has_exited(owner_.pidfd)) return ESRCH;
  PrivateAddress::Witness seen;
  const iovec here{seen.data(), seen.size()};
  const iovec there{reinterpret_cast<void*>(address_.witness_at), seen.size()};
  const ssize_t got = process_vm_readv(owner_.pid, &here, 1, &there, 1, 0);
  if (got < 0 && errno != EFAULT) return errno;
  return got == static_cast<ssize_t>(seen.size()) && seen == address_.witness ? 0 : ESRCH;
}

Result<std::shared_ptr<RemoteMemory>> OtherProcessMemory::open(const PeerProcess& owner,
                                                               const PrivateAddress& address,
                                                               std::uint64_t nbytes) {
  if (nbytes == 0 || address.data > UINT64_MAX - nbytes) {
    return Status(Code::kProtocol, "the peer described memory that wraps around");
  }
  if (owner.pid <= 0) {
    return Status(Code::kTransportUnavailable,
                  std::string("shm: the memory is private to a process in another pid namespace, "
                              "which this process cannot name to the kernel; share the namespace "
                              "(docker: --pid). ") +
                      kRemedy);
  }
  const std::shared_ptr<OtherProcessMemory> memory(
      new OtherProcessMemory(owner, address, nbytes));
  switch (const int error = memory->look_at_owner()) {
    case 0:
      break;
    case ESRCH:
      return Status(Code::kTransportUnavailable,
                    "shm: process " + std::to_string(owner.pid) +
                        ", at the other end of the connection, is gone or is not the one that owns "
                        "the private memory (a relay?)");
    default:
      return refused(error, owner);
  }
  if (owner.pid == getpid()) {
    return std::shared_ptr<RemoteMemory>(std::make_shared<OwnProcessMemory>(
        reinterpret_cast<std::byte*>(address.data), nbytes));
  }
  return std::shared_ptr<RemoteMemory>(memory);
}

Status OtherProcessMemory::copy(Direction direction, std::span<const Piece> pieces) const {
  std::array<iovec, kMostVectors> local, remote;
  std::uint64_t skip = 0;  // Bytes of the first piece that are done.
  while (!pieces.empty()) {
    std::size_t count = 0;
    std::uint64_t wanted = 0;
    for (; count < std::min(pieces.size(), kMostVectors); ++count) {
      const Piece& piece = pieces[count];
      const std::uint64_t done = count == 0 ? skip : 0;
      local[count] = {piece.local + done, piece.nbytes - done};
      remote[count] = {reinterpret_cast<void*>(address_.data + piece.offset + done),
                       piece.nbytes - done};
      wanted += piece.nbytes - done;
    }
    if (const int error = look_at_owner(); error == ESRCH) {
      return Status(Code::kPeerLost, "the owner's process has exited, or runs another program now");
    }
    const auto call = direction == Direction::kPut ? process_vm_writev : process_vm_readv;
    const ssize_t moved = call(owner_.pid, local.data(), count, remote.data(), count, 0);
    if (moved < 0) {
      switch (errno) {
        case ESRCH:
          return Status(Code::kPeerLost, "the owner's process has exited");
        case EFAULT:
          return Status(Code::kSystem,
                        "memory on one side is not mapped, or may not be written: it was unmapped "
                        "or truncated while it was registered");
        case EPERM:
        case EACCES:
          return refused(errno, owner_);
        default:
          return Status::system(errno, "process_vm_writev");
      }
    }
    // Less than asked for: the call stops where a page is missing, and the next one says so.
    auto left = static_cast<std::uint64_t>(moved);
    if (left == 0 && wanted != 0) return Status(Code::kSystem, "the kernel copied nothing");
    skip += left;
    while (!pieces.empty() && skip >= pieces.front().nbytes) {
      skip -= pieces.front().nbytes;
      pieces = pieces.subspan(1);
    }
  }
  return Status::ok();
}

}  // namespace kvzc::shm

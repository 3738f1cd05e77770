#include "base/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <limits>
#include <string>
#include <utility>

#include "base/memory_limit.h"

namespace kvzc {
namespace {

Status shortage(int error_number, const std::string& doing, std::uint64_t nbytes) {
  std::string text = doing + " of " + std::to_string(nbytes) + " bytes failed: ";
  switch (error_number) {
    case ENOMEM:
    case ENOSPC:
      return Status(Code::kLimitExceeded,
                    text +
                        "no memory is left for it. Ask for less, free some, or raise the "
                        "container's memory limit (memory.max) or vm.max_map_count");
    case EMFILE:
    case ENFILE:
      return too_many_files(doing + " of " + std::to_string(nbytes) + " bytes");
    case EFBIG:
      return Status(Code::kLimitExceeded,
                    text + "larger than the kernel or RLIMIT_FSIZE (ulimit -f) allows");
    default:
      return Status::system(error_number, doing + " of " + std::to_string(nbytes) + " bytes");
  }
}

}  // namespace

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
    fd_ = std::move(other.fd_);
    identity_ = std::exchange(other.identity_, {});
  }
  return *this;
}

void SharedMemory::reset() {
  if (data_ != nullptr) munmap(std::exchange(data_, nullptr), nbytes_);
  nbytes_ = 0;
  fd_.reset();
}

Result<SharedMemory> SharedMemory::create(const char* label, std::uint64_t nbytes,
                                          MapAccess peers) {
  if (nbytes == 0) return Status(Code::kInvalidArgument, "memory of 0 bytes was asked for");
  if (nbytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    return shortage(EFBIG, "allocation", nbytes);
  }
  if (const MemoryLimit limit = available_memory(); nbytes > limit.bytes) {
    return Status(Code::kLimitExceeded, "allocation of " + std::to_string(nbytes) +
                                            " bytes failed: " + std::to_string(limit.bytes) +
                                            " are left by " + limit.source +
                                            ". Ask for less, free some, or raise that limit");
  }
  // Growing a file beyond this limit does not fail, it kills: SIGXFSZ.
  rlimit file_size{};
  if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && nbytes > file_size.rlim_cur) {
    return shortage(EFBIG, "allocation", nbytes);
  }
  OwnedFd fd(memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.is_valid()) return shortage(errno, "memfd_create", nbytes);
  const off_t length = static_cast<off_t>(nbytes);
  if (ftruncate(fd.get(), length) != 0) return shortage(errno, "allocation", nbytes);
  int failed;
  while ((failed = fallocate(fd.get(), 0, 0, length)) != 0 && errno == EINTR) {
  }
  if (failed != 0) return shortage(errno, "allocation", nbytes);
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return Status::system(errno, "sealing a memfd");
  }
  Result<SharedMemory> out = map(std::move(fd), nbytes, MapAccess::kReadWrite);
  if (!out.is_ok()) return out;
  // Mappings that exist may go on writing. Kernels before 5.1 do not have this seal.
  if (peers == MapAccess::kRead) (void)fcntl(out->fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  if (fcntl(out->fd(), F_ADD_SEALS, F_SEAL_SEAL) != 0) {
    return Status::system(errno, "sealing a memfd");
  }
  return out;
}

Result<SharedMemory> SharedMemory::map(OwnedFd fd, std::uint64_t nbytes, MapAccess access) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::kProtocol, "the peer's memory is not sealed against shrinking");
  }
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return Status::system(errno, "fstat of a memfd");
  if (info.st_size < 0 || static_cast<std::uint64_t>(info.st_size) < nbytes || nbytes == 0) {
    return Status(Code::kProtocol, "the peer's memory has " + std::to_string(info.st_size) +
                                       " bytes, not the " + std::to_string(nbytes) +
                                       " it was announced with");
  }
  const int protection = access == MapAccess::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mmap(nullptr, nbytes, protection, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return shortage(errno, "mapping", nbytes);
  SharedMemory out;
  out.data_ = static_cast<std::byte*>(data);
  out.nbytes_ = nbytes;
  out.fd_ = std::move(fd);
  out.identity_ = {static_cast<std::uint64_t>(info.st_dev),
                   static_cast<std::uint64_t>(info.st_ino)};
  return out;
}

Result<OwnedFd> SharedMemory::read_only_fd() const {
  const std::string path = "/proc/self/fd/" + std::to_string(fd_.get());
  OwnedFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_valid()) return shortage(errno, "reopening", nbytes_);
  return fd;
}

ForkGuard::ForkGuard() : nbytes_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
  void* page = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, nbytes_, MADV_WIPEONFORK) != 0) {
    munmap(page, nbytes_);
    return;
  }
  page_ = static_cast<std::uint8_t*>(page);
  *page_ = 1;
}

ForkGuard::~ForkGuard() {
  if (page_ != nullptr) munmap(page_, nbytes_);
}

}  // namespace kvzc

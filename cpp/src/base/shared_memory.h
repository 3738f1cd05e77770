// Anonymous shared memory that can neither shrink nor grow: a sealed memfd, mapped.
//
// Nothing of it has a name in a file system, so a crash leaves nothing behind. It is allocated at
// once, so a shortage is an error at creation and never a SIGBUS at first touch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fd.h"
#include "kvzc/status.h"

namespace kvzc {

enum class MapAccess { kRead, kReadWrite };

// What tells two descriptors of the same memory from descriptors of two memories.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  bool operator==(const FileIdentity&) const = default;
};

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory() { reset(); }

  // Makes `nbytes` of zeroed memory, mapped for reading and writing.
  // Errors: kInvalidArgument for 0 bytes; kLimitExceeded when the memory, a descriptor or a
  // mapping is not to be had, with the limit and how to raise it.
  // With kRead, peers cannot map it for writing, whatever they do with a descriptor of it.
  static Result<SharedMemory> create(const char* label, std::uint64_t nbytes,
                                     MapAccess peers = MapAccess::kReadWrite);

  // Maps what another process made, after checking that it is sealed and large enough.
  // Errors: kProtocol when it could shrink or is too small; kLimitExceeded.
  static Result<SharedMemory> map(OwnedFd fd, std::uint64_t nbytes, MapAccess access);

  std::byte* data() const { return data_; }
  std::uint64_t nbytes() const { return nbytes_; }
  int fd() const { return fd_.get(); }
  FileIdentity identity() const { return identity_; }

  // Gives a descriptor of the same memory that cannot be mapped for writing.
  Result<OwnedFd> read_only_fd() const;
  // Gives up the descriptor; the mapping stays.
  void close_fd() { fd_.reset(); }

 private:
  void reset();

  std::byte* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
  OwnedFd fd_;
  FileIdentity identity_;
};

// A page that a forked child sees as zero: tells, for the price of a load, whether this process is
// the one that made it.
class ForkGuard {
 public:
  ForkGuard();
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  bool is_forked_child() const {
    return page_ != nullptr && *const_cast<const volatile std::uint8_t*>(page_) == 0;
  }

 private:
  std::uint8_t* page_ = nullptr;
  std::size_t nbytes_ = 0;
};

}  // namespace kvzc

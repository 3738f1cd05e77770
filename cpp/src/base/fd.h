// A file descriptor that closes itself.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "kvzc/status.h"

namespace kvzc {

class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~OwnedFd() { reset(); }

  int get() const { return fd_; }
  bool is_valid() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// Says that no descriptor is left, and how to have more.
inline Status too_many_files(std::string doing) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return Status(Code::kLimitExceeded,
                std::move(doing) + ": too many open files, " + std::to_string(limit.rlim_cur) +
                    " are allowed (RLIMIT_NOFILE). Raise the limit (ulimit -n), or close regions "
                    "and engines that are no longer needed; allocate large and slice");
}

// Gives another descriptor of the same. Errors: kLimitExceeded when none is left.
inline Result<OwnedFd> duplicate(int fd) {
  OwnedFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.is_valid()) return copy;
  if (errno == EMFILE) return too_many_files("duplicating a descriptor");
  return Status::system(errno, "duplicating a descriptor");
}

}  // namespace kvzc

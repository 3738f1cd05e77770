#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "base/sha256.h"

namespace kvzc {
namespace {

// Newer than the headers of older systems.
constexpr int kSoPeerPidfd = 77;
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

bool has_hung_up(int socket) {
  pollfd look{socket, POLLRDHUP, 0};
  return poll(&look, 1, 0) == 1 && (look.revents & (POLLRDHUP | POLLHUP)) != 0;
}

// Threads of a forked child keep the variables of their parent.
std::atomic<std::uint32_t> forks{0};

}  // namespace

OwnedFd open_pidfd(int socket, std::int32_t pid) {
  int fd = -1;
  socklen_t length = sizeof fd;
  if (getsockopt(socket, SOL_SOCKET, kSoPeerPidfd, &fd, &length) == 0 && fd >= 0) {
    return OwnedFd(fd);
  }
  if (pid <= 0) return OwnedFd();
  OwnedFd opened(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  // While the connection stood the number was still that process's.
  if (opened.is_valid() && has_hung_up(socket)) return OwnedFd();
  return opened;
}

bool has_exited(int pidfd) {
  pollfd look{pidfd, POLLIN, 0};
  return poll(&look, 1, 0) == 1 && (look.revents & POLLIN) != 0;
}

ThreadLook look_at_thread(std::int32_t pid, std::int32_t thread, int pidfd) {
  ThreadLook look;
  const std::string process = "/proc/" + std::to_string(pid);
  const std::string path = process + "/task/" + std::to_string(thread) + "/status";
  std::string text(4096, '\0');
  ssize_t got = -1;
  bool is_missing = false;
  if (const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC)); file.is_valid()) {
    got = read(file.get(), text.data(), text.size());
    is_missing = got < 0 && errno == ESRCH;
  } else {
    is_missing = errno == ENOENT;
  }
  // Looked at after the file: what it said was said of this process.
  if (pidfd >= 0 && has_exited(pidfd)) {
    look.state = ThreadLook::State::kGone;
    return look;
  }
  if (got <= 0) {
    struct stat seen;
    const bool is_shown = pidfd >= 0 && stat(process.c_str(), &seen) == 0;
    if (is_missing && is_shown) look.state = ThreadLook::State::kGone;
    return look;
  }
  text.resize(static_cast<std::size_t>(got));
  const auto value_of = [&text](std::string_view name) -> const char* {
    const std::size_t at = text.find(name);
    return at == std::string::npos ? nullptr : text.c_str() + at + name.size();
  };
  const char* const state = value_of("\nState:\t");
  const char* const voluntary = value_of("\nvoluntary_ctxt_switches:\t");
  const char* const forced = value_of("\nnonvoluntary_ctxt_switches:\t");
  if (state == nullptr || voluntary == nullptr || forced == nullptr) return look;
  look.switches = std::strtoull(voluntary, nullptr, 10) + std::strtoull(forced, nullptr, 10);
  switch (*state) {
    case 'T':
    case 't':
      look.state = ThreadLook::State::kStopped;
      break;
    case 'X':
    case 'Z':
      look.state = ThreadLook::State::kGone;
      break;
    default:
      look.state = ThreadLook::State::kAlive;
  }
  return look;
}

std::uint32_t this_thread_number() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  thread_local std::uint32_t number = 0;
  thread_local std::uint32_t known_at = 0;
  const std::uint32_t now = forks.load(std::memory_order_relaxed) + 1;
  if (known_at != now) {
    number = static_cast<std::uint32_t>(syscall(SYS_gettid));
    known_at = now;
  }
  return number;
}

std::string host_token() {
  // The kernel draws it at boot; containers of one host see the same.
  char text[64];
  const OwnedFd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  const ssize_t nbytes = file.is_valid() ? read(file.get(), text, sizeof text) : -1;
  if (nbytes <= 0) return "00000000";
  const Digest digest = sha256(std::as_bytes(std::span(text, static_cast<std::size_t>(nbytes))));
  std::string out;
  for (std::size_t i = 0; i < 4; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    out += kDigits[std::to_integer<unsigned>(digest[i]) >> 4];
    out += kDigits[std::to_integer<unsigned>(digest[i]) & 15];
  }
  return out;
}

std::uint64_t pid_namespace() {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

}  // namespace kvzc

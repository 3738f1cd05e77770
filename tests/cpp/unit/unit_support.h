// What the unit tests share: repeatable randomness, forked children with a time limit, bytes.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVZC_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KVZC_SANITIZED 1
#endif
#endif
#ifndef KVZC_SANITIZED
// 1 under ASan or TSan, which need address space and descriptors for themselves: tests that take
// these away are left out.
#define KVZC_SANITIZED 0
#endif

namespace kvzc::test {

// A generator with a fixed seed. Put KVZC_TRACE_SEED(random) into the test that uses it.
struct Random {
  explicit Random(std::uint64_t seed_value) : seed(seed_value), engine(seed_value) {}

  std::int64_t between(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine);
  }
  bool one_in(int n) { return between(1, n) == 1; }
  template <typename T>
  const T& pick(const std::vector<T>& from) {
    return from[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(from.size()) - 1))];
  }
  std::byte byte() { return static_cast<std::byte>(engine() & 0xff); }
  std::vector<std::byte> bytes(std::size_t count) {
    std::vector<std::byte> out(count);
    for (std::byte& b : out) b = byte();
    return out;
  }

  std::uint64_t seed;
  std::mt19937_64 engine;
};

#define KVZC_TRACE_SEED(random) SCOPED_TRACE("seed " + std::to_string((random).seed))

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

inline std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) {
    out += "0123456789abcdef"[std::to_integer<unsigned>(b >> 4)];
    out += "0123456789abcdef"[std::to_integer<unsigned>(b & std::byte{15})];
  }
  return out;
}

inline std::vector<std::byte> from_hex(std::string_view text) {
  std::vector<std::byte> out;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    out.push_back(static_cast<std::byte>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16)));
  }
  return out;
}

// In a child: says where it went wrong, and makes the child fail.
#define KVZC_CHILD_CHECK(condition)                                                    \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::fprintf(stderr, "%s:%d: in a child: %s\n", __FILE__, __LINE__, #condition); \
      return 1;                                                                        \
    }                                                                                  \
  } while (false)

// A forked child that runs `body` and exits with what it gives; killed by SIGALRM after `seconds`.
// The destructor kills and reaps what was not waited for.
class Child {
 public:
  explicit Child(const std::function<int()>& body, unsigned seconds = 20) {
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    signal(SIGALRM, SIG_DFL);
    alarm(seconds);
    _exit(body());
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    wait();
  }

  pid_t pid() const { return pid_; }
  // Gives "exit 0", "exit 1", "signal 14" ...
  std::string wait() {
    if (pid_ < 0) return "not forked";
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    if (WIFEXITED(status)) return "exit " + std::to_string(WEXITSTATUS(status));
    return "signal " + std::to_string(WTERMSIG(status));
  }

 private:
  pid_t pid_ = -1;
};

// The number of open descriptors of this process.
inline int open_fds() {
  DIR* directory = opendir("/proc/self/fd");
  int count = 0;
  while (directory != nullptr && readdir(directory) != nullptr) ++count;
  if (directory != nullptr) closedir(directory);
  return count;
}

// The number of mappings of this process whose line in /proc/self/maps contains `text`.
inline int mappings_of(std::string_view text) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  int count = 0;
  char line[1024];
  while (maps != nullptr && std::fgets(line, sizeof line, maps) != nullptr) {
    if (std::string_view(line).find(text) != std::string_view::npos) ++count;
  }
  if (maps != nullptr) std::fclose(maps);
  return count;
}

}  // namespace kvzc::test

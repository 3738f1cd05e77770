// Sleeping on a 32-bit word, within one process or across processes that map the same page.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace kvzc {

enum class FutexScope { kPrivate, kShared };

// Sleeps while `word` holds `expected`, at most `timeout_ns`. May return early for no reason.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::int64_t timeout_ns, FutexScope scope) {
  timespec timeout;
  timeout.tv_sec = timeout_ns / 1'000'000'000;
  timeout.tv_nsec = timeout_ns % 1'000'000'000;
  syscall(SYS_futex, &word, FUTEX_WAIT | (scope == FutexScope::kPrivate ? FUTEX_PRIVATE_FLAG : 0),
          expected, &timeout, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<std::uint32_t>& word, FutexScope scope) {
  syscall(SYS_futex, &word, FUTEX_WAKE | (scope == FutexScope::kPrivate ? FUTEX_PRIVATE_FLAG : 0),
          INT_MAX, nullptr, nullptr, 0);
}

inline void futex_wake_one(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, nullptr, nullptr, 0);
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace kvzc

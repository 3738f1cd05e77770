// Mutex and its two locks: the standard ones, told to Clang, which then proves at build time that what a
// mutex guards is touched under it (`make thread-safety`). Other compilers see nothing of it.
#pragma once

#include <mutex>

#if defined(__clang__)
#define KVZC_THREAD_SAFETY(x) __attribute__((x))
#else
#define KVZC_THREAD_SAFETY(x)
#endif
// On a member: touched under this mutex only.
#define KVZC_GUARDED_BY(mutex) KVZC_THREAD_SAFETY(guarded_by(mutex))
// On a function: called with it held / not held.
#define KVZC_REQUIRES(...) KVZC_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define KVZC_EXCLUDES(...) KVZC_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
// On a function that Clang cannot follow; say why.
#define KVZC_NO_THREAD_SAFETY KVZC_THREAD_SAFETY(no_thread_safety_analysis)

namespace kvzc {

class KVZC_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() KVZC_THREAD_SAFETY(acquire_capability()) { mutex_.lock(); }
  void unlock() KVZC_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }
  bool try_lock() KVZC_THREAD_SAFETY(try_acquire_capability(true)) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

// The caller holds it already.
struct IsHeld {};
inline constexpr IsHeld kIsHeld;

// Holds it as long as it lives.
template <typename AnyMutex>
class KVZC_THREAD_SAFETY(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(AnyMutex& mutex) KVZC_THREAD_SAFETY(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  MutexLock(AnyMutex& mutex, IsHeld) KVZC_THREAD_SAFETY(requires_capability(mutex)) : mutex_(mutex) {}
  ~MutexLock() KVZC_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  AnyMutex& mutex_;
};

// The same, and may be let go and taken again meanwhile: for what waits (std::condition_variable_any).
template <typename AnyMutex>
class KVZC_THREAD_SAFETY(scoped_lockable) UniqueLock {
 public:
  explicit UniqueLock(AnyMutex& mutex) KVZC_THREAD_SAFETY(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~UniqueLock() KVZC_THREAD_SAFETY(release_capability()) {
    if (is_held_) mutex_.unlock();
  }
  UniqueLock(const UniqueLock&) = delete;
  UniqueLock& operator=(const UniqueLock&) = delete;

  void lock() KVZC_THREAD_SAFETY(acquire_capability()) {
    mutex_.lock();
    is_held_ = true;
  }
  void unlock() KVZC_THREAD_SAFETY(release_capability()) {
    is_held_ = false;
    mutex_.unlock();
  }

 private:
  AnyMutex& mutex_;
  bool is_held_ = true;
};

// Lets go of a held one as long as it lives, however what comes meanwhile ends.
class KVZC_THREAD_SAFETY(scoped_lockable) MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) KVZC_THREAD_SAFETY(release_capability(mutex)) : mutex_(mutex) {
    mutex_.unlock();
  }
  ~MutexUnlock() KVZC_THREAD_SAFETY(release_capability()) { mutex_.lock(); }
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace kvzc

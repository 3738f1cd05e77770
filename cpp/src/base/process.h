// Other processes of this host, as the kernel shows them: whether they live, which threads run.
#pragma once

#include <cstdint>
#include <string>

#include "base/fd.h"
#include "kvzc/status.h"

namespace kvzc {

// Gives a descriptor that becomes readable when the process at the other end of a Unix socket has
// exited; an invalid one where the kernel cannot give it.
OwnedFd open_pidfd(int socket, std::int32_t pid);
// Thread: any. Cost: one system call.
bool has_exited(int pidfd);

// A thread of another process, as seen at one moment.
struct ThreadLook {
  enum class State {
    kStopped,  // By a signal or a debugger.
    kAlive,
    kGone,
    kUnknown  // /proc does not show it.
  };
  State state = State::kUnknown;
  std::uint64_t switches = 0;  // How often it was taken off a processor, ever.
};
// `pidfd` is the process's, to tell it from a later one with the same number; or -1.
ThreadLook look_at_thread(std::int32_t pid, std::int32_t thread, int pidfd);
// Says whether a thread was off the processors at some time between two looks, of which the second
// came a millisecond or more after the first. One that sleeps counts only once it has moved: its
// state alone may be about to change.
inline bool was_descheduled(const ThreadLook& first, const ThreadLook& second) {
  return second.switches > first.switches || (first.state == ThreadLook::State::kStopped &&
                                              second.state == ThreadLook::State::kStopped);
}

// Gives the number of this thread as the kernel counts, as /proc/<pid>/task does. Cost: a load.
std::uint32_t this_thread_number();

// Gives eight hexadecimal digits that tell this host, as it runs now, from others.
std::string host_token();

// Gives what tells pid namespaces apart, or 0 when the kernel does not say.
std::uint64_t pid_namespace();

}  // namespace kvzc

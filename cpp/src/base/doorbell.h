// Doorbell: where the threads of one engine sleep until a peer, in any process, has something.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/fd.h"
#include "base/shared_memory.h"
#include "kvzc/status.h"

namespace kvzc {

class Doorbell {
 public:
  Doorbell() = default;
  // Makes the engine's own.
  static Result<Doorbell> create();
  // Opens a peer's, from the two descriptors that share() gave.
  static Result<Doorbell> open(OwnedFd memory, OwnedFd event);
  // Gives duplicates of the two descriptors, to be sent to a peer.
  Status share(OwnedFd* memory, OwnedFd* event) const;

  // Says that something was published. Call after the publishing store. Thread: any, any process.
  // Cost: two atomic operations, and a system call only when somebody sleeps or polls.
  void ring() const;

  // --- Owner's side ---

  std::uint32_t count() const;
  // Sleeps while count() is `seen`, at most `timeout_ns`. May return early.
  void sleep(std::uint32_t seen, std::int64_t timeout_ns) const;
  // Asks for the event descriptor to become readable at the next ring.
  void arm_event() const;
  // Says whether that ring is still to come.
  bool is_event_armed() const;
  // Makes the event descriptor readable / not readable.
  void set_event() const;
  void clear_event() const;
  int event_fd() const { return event_.get(); }

 private:
  struct Page;
  Page* page() const { return reinterpret_cast<Page*>(memory_.data()); }

  SharedMemory memory_;
  OwnedFd event_;
};

}  // namespace kvzc

// Devices that lie: verbs that go through to the real devices, but say and do what they are told to.
//
// The real ones are those of a Soft-RoCE guest, which has no small limits and refuses nothing.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzc::lies {

// What one device does that is not so. 0: it tells the truth. What it says of itself is heard by
// engines that open it afterwards.
struct Device {
  std::atomic<std::uint64_t> max_mr_size{0};
  std::atomic<int> max_sge{0};
  std::atomic<int> max_cqe{0};
  std::atomic<int> max_reads{0};
  std::atomic<int> active_mtu{0};
  // Set before an engine opens it.
  std::optional<std::vector<ibv_gid_entry>> gids;

  // An errno: it takes no memory, once it has taken so many pieces more.
  std::atomic<int> refuses_memory{0};
  std::atomic<std::int64_t> takes_memory{0};
  // So many times it does not let go of memory.
  std::atomic<int> keeps_memory{0};
  // Pieces of memory that it holds.
  std::atomic<std::int64_t> held{0};

  // An errno: it refuses one work request, after so many more. Only one.
  std::atomic<int> refuses_request{0};
  std::atomic<std::int64_t> takes_requests{0};
  // What it took: work requests that move data.
  std::atomic<std::uint64_t> writes{0};
  std::atomic<std::uint64_t> reads{0};
  // So many messages, which the peer has, come back as ones that it never got.
  std::atomic<int> disowns_messages{0};
  // Nothing that was posted comes back.
  std::atomic<bool> is_dead{false};
};

// "owner:rxe0": that device, as the engine of this name has it open. Devices of two names do not reach
// each other in the guest, so both engines have the same.
Device& device(const std::string& of);
// Who opens devices from now on, on this thread.
void open_as(const std::string& engine);
// Pieces of memory that all devices hold.
std::int64_t all_held();
// All tell the truth again, and what was recorded is forgotten. Memory that is held stays counted.
void stop_lying();

// What a queue pair was asked to become.
struct Modified {
  std::string device;
  ibv_qp_attr attributes;
};
// In order, those that asked for this state.
std::vector<Modified> modified_to(ibv_qp_state state);
// From now on queue pairs get no further than INIT, whatever is said of them: for addresses that
// lead nowhere.
void connect_nothing();

// Whoever has this device open is told so. Gives how many those are.
int raise(const std::string& device, ibv_event_type event);

}  // namespace kvzc::lies

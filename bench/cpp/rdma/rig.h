// Rig: two processes on one RDMA device, joined by kvzc and by bare verbs over the same memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpp/rdma/raw_pair.h"
#include "kvzc/engine.h"

namespace kvzc::bench {

// Each process: an engine on the rdma transport, a region, and a RawPair on the same bytes. The
// first half of the memory of either takes what kvzc puts, the second what the floor writes.
struct Side {
  Side(const std::string& device, std::uint64_t half_bytes);
  // Joins both sides, each at its end of the socket.
  void meet(int socket);
  TensorSpec all(std::vector<std::int64_t> shape) const;

  // One way of the ping-pong: 8 bytes and a word that they are there.
  void kvzc_ping();
  void kvzc_await();
  void raw_ping();
  void raw_await();

  const std::uint64_t half_bytes;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<SharedAllocation> memory;
  Region region;
  LocalView source;
  RemoteView target;
  std::optional<RawPair> raw;

 private:
  LocalView ping_source_;
  RemoteView ping_target_;
  Transfer ping_;
};

class Rig {
 public:
  Rig(const std::string& device, std::uint64_t half_bytes);
  ~Rig();
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  Side& here() { return *here_; }
  // Gives the source new random bytes.
  void refill();
  // Has the owner compare both halves with what the pieces say. Ends the program when one differs.
  void verify(const std::vector<RawPair::Piece>& pieces);
  // Has the other process answer so many pings.
  void echo_kvzc(std::uint64_t count);
  void echo_raw(std::uint64_t count);

 private:
  int socket_ = -1;
  int child_ = -1;
  std::uint64_t seed_ = 0;
  std::optional<Side> here_;
};

}  // namespace kvzc::bench

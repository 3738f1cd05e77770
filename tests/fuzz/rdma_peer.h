// A channel over devices that are not there (fake_verbs.h), whose peer a fuzzer plays.
#pragma once

#include <array>
#include <memory>

#include "fuzz/fake_verbs.h"
#include "fuzz/shm_host.h"
#include "transport/rdma/factory.h"
#include "transport/rdma/message.h"

namespace kvzc::fuzz {

// What lives as long as the program.
class RdmaWorld {
 public:
  static constexpr std::uint32_t kDepth = 16;

  // A new channel; its peer has said nothing yet.
  std::unique_ptr<Channel> join() {
    forget_pairs();
    host.arrivals.clear();
    // The first half is ours, the second says what a peer would.
    const std::unique_ptr<ChannelHalf> half = Host::must(transport->open_channel());
    Blob offer;
    {
      const std::unique_ptr<ChannelHalf> other = Host::must(transport->open_channel());
      offer = Host::must(other->offer());
    }
    ChannelPeer peer;
    peer.kick = [](void*) { return false; };
    std::unique_ptr<Channel> channel = Host::must(half->join(std::move(offer), peer));
    channel->drain();
    return channel;
  }

  Host host;
  std::array<std::byte, 1 << 16> local{};

 private:
  class Sink final : public OperationSink {
   public:
    void retire(Operation& operation, Status status) override {
      KVZC_FUZZ_CHECK(operation.state.end(std::move(status), 1));  // Exactly once.
    }
    void retain(Operation& operation) override { operation.retain(); }
    void release(Operation& operation) override { (void)operation.release(); }
  };
  static RdmaOptions few() {
    RdmaOptions out;
    out.queue_depth = 64;
    out.least_striped_bytes = 512;
    return out;
  }

  Sink sink_;
  Registrations registrations_;
  TransportHost lent_{host.doorbell, host.fences, sink_, host,
                      TransportTuning{.arrival_depth = kDepth}, few()};

 public:
  const std::unique_ptr<Transport> transport = Host::must(rdma::make_transport(lent_));
  const MemoryPiece piece{local.data(), local.size(), nullptr, &registrations_};
  const std::shared_ptr<RemoteMemory> remote = Host::must(transport->import_memory(
      Host::must(transport->describe(piece, Access::kBoth)), local.size(), {}));
};

}  // namespace kvzc::fuzz

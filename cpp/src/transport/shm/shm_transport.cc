// Set-up of the shared-memory transport: what peers exchange once.

#include "base/bytes.h"
#include "base/process.h"
#include "base/sha256.h"
#include "base/shared_memory.h"
#include "transport/shm/copy_pool.h"
#include "transport/shm/factory.h"
#include "transport/shm/populator.h"
#include "transport/shm/shm_channel.h"

namespace kvzc::shm {
namespace {

// The order of descriptors in an offer.
enum OfferFd : std::size_t { kOutboxFd, kDoorbellFd, kEventFd, kFencesFd, kOfferFds };

// How a piece of memory is described to a peer.
enum MemoryKind : std::uint8_t {
  kPrivate = 0,  // By its address; the kernel copies.
  kSealed = 1    // By a memfd to map.
};

class ShmChannelHalf final : public ChannelHalf {
 public:
  ShmChannelHalf(TransportHost& host, CopyPool& pool, Outbox outbox)
      : host_(host), pool_(pool), outbox_(std::move(outbox)) {}

  Result<Blob> offer() override {
    Blob blob;
    ByteWriter out;
    out.u32(outbox_.ring_bytes());
    out.u32(host_.fences.slots());
    out.u32(host_.tuning.arrival_depth);
    out.u64(pid_namespace());
    blob.bytes = out.take();
    blob.fds.resize(kOfferFds);
    Result<OwnedFd> outbox = duplicate(outbox_.memory().fd());
    if (!outbox.is_ok()) return outbox.status();
    blob.fds[kOutboxFd] = outbox.take();
    Status shared = host_.doorbell.share(&blob.fds[kDoorbellFd], &blob.fds[kEventFd]);
    if (!shared.is_ok()) return shared;
    Result<OwnedFd> fences = host_.fences.share();
    if (!fences.is_ok()) return fences.status();
    blob.fds[kFencesFd] = fences.take();
    return blob;
  }

  Result<std::unique_ptr<Channel>> join(Blob peer_offer, const ChannelPeer& peer) override {
    ByteReader in(peer_offer.bytes);
    const std::uint32_t ring_bytes = in.u32();
    const std::uint32_t fence_slots = in.u32();
    const std::uint32_t arrival_depth = in.u32();
    const std::uint64_t peer_namespace = in.u64();
    if (!in.is_good() || peer_offer.fds.size() != kOfferFds) {
      return Status(Code::kProtocol, "the peer's offer of shared memory is incomplete");
    }
    Result<Outbox> outbox = Outbox::open(std::move(peer_offer.fds[kOutboxFd]), ring_bytes);
    if (!outbox.is_ok()) return outbox.status();
    Result<Doorbell> doorbell =
        Doorbell::open(std::move(peer_offer.fds[kDoorbellFd]), std::move(peer_offer.fds[kEventFd]));
    if (!doorbell.is_ok()) return doorbell.status();
    Result<FenceBoard> fences = FenceBoard::open(std::move(peer_offer.fds[kFencesFd]), fence_slots);
    if (!fences.is_ok()) return fences.status();
    const bool shows_threads =
        peer.process.pid > 0 && peer_namespace != 0 && peer_namespace == pid_namespace();
    return std::unique_ptr<Channel>(std::make_unique<ShmChannel>(
        host_, pool_, std::move(outbox_),
        PeerSide{outbox.take(), doorbell.take(), fences.take(), arrival_depth, shows_threads},
        peer));
  }

 private:
  TransportHost& host_;
  CopyPool& pool_;
  Outbox outbox_;
};

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(TransportHost& host)
      : host_(host), pool_(host.tuning.copy_threads, host.operations) {}

  Status start() { return fill_random(witness_); }

  const char* name() const override { return "shm"; }
  bool is_local() const override { return true; }

  Status prepare(const MemoryPiece&) override { return Status::ok(); }
  bool enforces_access() const override { return false; }

  Result<Blob> describe(const MemoryPiece& piece, Access) override {
    Blob blob;
    ByteWriter out;
    if (piece.shared == nullptr) {
      out.u8(kPrivate);
      out.u64(reinterpret_cast<std::uint64_t>(piece.data));
      out.u64(reinterpret_cast<std::uint64_t>(witness_.data()));
      out.raw(witness_);
      blob.bytes = out.take();
      return blob;
    }
    out.u8(kSealed);
    blob.bytes = out.take();
    Result<OwnedFd> memory = duplicate(piece.shared->fd());
    if (!memory.is_ok()) return memory.status();
    blob.fds.push_back(memory.take());
    return blob;
  }

  Result<std::shared_ptr<RemoteMemory>> import_memory(Blob description, std::uint64_t nbytes,
                                                      const PeerProcess& owner) override {
    ByteReader in(description.bytes);
    const std::uint8_t kind = in.u8();
    if (kind == kPrivate && description.fds.empty()) {
      PrivateAddress address;
      address.data = in.u64();
      address.witness_at = in.u64();
      address.witness = in.array<16>();
      if (!in.is_good()) return Status(Code::kProtocol, "the peer's description is incomplete");
      return OtherProcessMemory::open(owner, address, nbytes);
    }
    if (kind != kSealed || !in.is_good() || description.fds.size() != 1) {
      return Status(Code::kProtocol, "the peer described its memory in an unknown way");
    }
    Result<SharedMemory> memory =
        SharedMemory::map(std::move(description.fds[0]), nbytes, MapAccess::kReadWrite);
    if (!memory.is_ok()) return memory.status();
    memory->close_fd();
    auto mapped = std::make_shared<MappedMemory>(memory.take());
    populator_.add(mapped);
    return std::shared_ptr<RemoteMemory>(std::move(mapped));
  }

  Result<std::unique_ptr<ChannelHalf>> open_channel() override {
    Result<Outbox> outbox = Outbox::create(host_.tuning.tag_ring_bytes);
    if (!outbox.is_ok()) return outbox.status();
    return std::unique_ptr<ChannelHalf>(
        std::make_unique<ShmChannelHalf>(host_, pool_, outbox.take()));
  }

  bool stop(std::int64_t deadline_ns) override {
    populator_.stop();
    return pool_.stop(deadline_ns);
  }

 private:
  TransportHost& host_;
  CopyPool pool_;
  Populator populator_;
  PrivateAddress::Witness witness_{};
};

}  // namespace

Result<std::unique_ptr<Transport>> make_transport(TransportHost& host) {
  auto transport = std::make_unique<ShmTransport>(host);
  if (Status filled = transport->start(); !filled.is_ok()) return filled;
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvzc::shm

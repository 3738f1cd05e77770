// Set-up of the rdma transport: what peers exchange once.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/bytes.h"
#include "base/process.h"
#include "base/sha256.h"
#include "transport/rdma/factory.h"
#include "transport/rdma/poller.h"
#include "transport/rdma/rdma_channel.h"

namespace kvzc::rdma {
namespace {

constexpr std::size_t kMostRails = 32;
constexpr std::uint8_t kOfferVersion = 1;

void write(ByteWriter& out, const QueuePairAddress& address) {
  out.u32(address.number);
  out.u32(address.first_packet);
  out.u16(address.lid);
  out.u8(address.mtu);
  out.u8(address.most_reads);
  out.u8(address.is_ethernet);
  out.u8(address.acknowledges_after_store);
  out.u64(address.flush_address);
  out.u32(address.flush_key);
  out.varint(address.gids.size());
  for (const Gid& gid : address.gids) {
    out.u8(gid.is_roce_v2);
    out.raw(std::as_bytes(std::span(gid.bytes)));
  }
}

QueuePairAddress read(ByteReader& in) {
  QueuePairAddress address;
  address.number = in.u32();
  address.first_packet = in.u32();
  address.lid = in.u16();
  address.mtu = std::clamp<std::uint8_t>(in.u8(), IBV_MTU_256, IBV_MTU_4096);
  address.most_reads = in.u8();
  address.is_ethernet = in.u8() != 0;
  address.acknowledges_after_store = in.u8() != 0;
  address.flush_address = in.u64();
  address.flush_key = in.u32();
  const std::size_t gids = in.count(17);
  for (std::size_t i = 0; i < gids; ++i) {
    Gid gid;
    gid.is_roce_v2 = in.u8() != 0;
    const auto bytes = in.array<16>();
    std::memcpy(gid.bytes.data(), bytes.data(), bytes.size());
    address.gids.push_back(gid);
  }
  return address;
}

class RdmaChannelHalf final : public ChannelHalf, private CompletionTarget {
 public:
  RdmaChannelHalf(TransportHost& host, Poller& poller) : host_(host), poller_(poller) {}

  Status make_pairs() {
    for (const auto& rail : poller_.rails()) {
      Result<std::unique_ptr<QueuePair>> pair = QueuePair::make(*rail, this, host_.rdma);
      if (!pair.is_ok()) return pair.status();
      pairs_.push_back(pair.take());
    }
    return Status::ok();
  }

  Result<Blob> offer() override {
    ByteWriter out;
    out.u8(kOfferVersion);
    out.text(host_token());
    out.u32(host_.tuning.arrival_depth);
    out.u8(static_cast<std::uint8_t>(pairs_.size()));
    for (const auto& pair : pairs_) write(out, pair->address());
    Blob blob;
    blob.bytes = out.take();
    return blob;
  }

  Result<std::unique_ptr<Channel>> join(Blob peer_offer, const ChannelPeer& peer) override {
    ByteReader in(peer_offer.bytes);
    const std::uint8_t version = in.u8();
    const bool is_same_host = in.text() == host_token();
    const std::uint32_t arrival_depth = in.u32();
    const std::size_t rails = std::min<std::size_t>(in.u8(), kMostRails);
    std::vector<QueuePairAddress> addresses;
    for (std::size_t i = 0; i < rails; ++i) addresses.push_back(read(in));
    if (!in.is_good() || version != kOfferVersion || arrival_depth == 0 || rails == 0) {
      return Status(Code::kProtocol, "the peer's offer of RDMA is incomplete");
    }
    // Rail i here goes to rail i there.
    if (pairs_.size() > rails) pairs_.resize(rails);
    auto channel =
        std::make_unique<RdmaChannel>(host_, poller_, std::move(pairs_), arrival_depth, peer);
    Status connected = channel->connect(addresses, is_same_host);
    if (!connected.is_ok()) return connected;
    return std::unique_ptr<Channel>(std::move(channel));
  }

 private:
  // Nothing was connected yet, so nothing completes.
  void on_completions(std::size_t, std::span<const ibv_wc>, Endings&) override {}

  TransportHost& host_;
  Poller& poller_;
  std::vector<std::unique_ptr<QueuePair>> pairs_;
};

class RdmaTransport final : public Transport {
 public:
  RdmaTransport(TransportHost& host, std::vector<std::unique_ptr<Rail>> rails)
      : host_(host), poller_(std::move(rails), host) {}

  Status start() { return poller_.start(); }

  const char* name() const override { return "rdma"; }
  bool is_local() const override { return false; }

  bool enforces_access() const override { return true; }

  Result<Blob> describe(const MemoryPiece& piece, Access access) override {
    ByteWriter out;
    out.u64(reinterpret_cast<std::uint64_t>(piece.data));
    out.raw(own_process());
    out.u8(static_cast<std::uint8_t>(poller_.rails().size()));
    for (const auto& rail : poller_.rails()) {
      Result<std::shared_ptr<Registration>> keys =
          Registration::of(rail->shared_device(), piece, access);
      if (!keys.is_ok()) {
        return Status(keys.status().code(), "rdma: " + std::string(keys.status().text()));
      }
      out.u64((*keys)->part_bytes());
      out.varint((*keys)->parts().size());
      for (const ibv_mr* part : (*keys)->parts()) out.u32(part->rkey);
    }
    Blob blob;
    blob.bytes = out.take();
    return blob;
  }

  Status prepare(const MemoryPiece& piece) override {
    for (const auto& rail : poller_.rails()) {
      const auto keys = Registration::of(rail->shared_device(), piece, Access::kBoth);
      if (!keys.is_ok()) return keys.status();
    }
    return Status::ok();
  }

  Result<std::shared_ptr<RemoteMemory>> import_memory(Blob description, std::uint64_t nbytes,
                                                      const PeerProcess&) override {
    ByteReader in(description.bytes);
    const std::uint64_t address = in.u64();
    const auto process = in.array<16>();
    std::vector<RdmaMemory::RailKeys> rails(in.u8());
    for (RdmaMemory::RailKeys& rail : rails) {
      rail.part_bytes = in.u64();
      rail.keys.resize(in.count(4));
      for (std::uint32_t& key : rail.keys) key = in.u32();
      if (rail.part_bytes == 0 || rail.keys.size() != (nbytes - 1) / rail.part_bytes + 1) in.fail();
    }
    if (!in.is_good() || nbytes == 0) {
      return Status(Code::kProtocol, "the peer described its memory in an unknown way");
    }
    return std::shared_ptr<RemoteMemory>(std::make_shared<RdmaMemory>(
        address, nbytes, std::move(rails), std::ranges::equal(process, own_process())));
  }

  Result<std::unique_ptr<ChannelHalf>> open_channel() override {
    auto half = std::make_unique<RdmaChannelHalf>(host_, poller_);
    if (Status made = half->make_pairs(); !made.is_ok()) return made;
    return std::unique_ptr<ChannelHalf>(std::move(half));
  }

  bool stop(std::int64_t) override {
    poller_.stop();  // Devices copy: its thread stands nowhere.
    return true;
  }

 private:
  // Equal addresses of two processes are not the same memory. A forked child inherits the random
  // part, and has its own number.
  static std::array<std::byte, 16> own_process() {
    static const std::array<std::byte, 16> drawn = [] {
      std::array<std::byte, 16> out{};
      (void)fill_random(out);
      return out;
    }();
    std::array<std::byte, 16> bytes = drawn;
    const pid_t pid = getpid();
    static_assert(sizeof pid == 4);
    std::memcpy(bytes.data(), &pid, sizeof pid);
    return bytes;
  }

  TransportHost& host_;
  Poller poller_;
};

}  // namespace

Result<std::string> describe_devices() {
  Result<std::vector<DeviceInfo>> devices = Device::list();
  if (!devices.is_ok()) return devices.status();
  std::string out;
  bool is_any_active = false;
  for (const DeviceInfo& device : *devices) {
    if (!out.empty()) out += "; ";
    out += device.name + " port " + std::to_string(device.port) +
           (device.is_active ? "" : " (down)") + (device.is_software ? ", software" : "") + ":";
    for (const Gid& gid : device.gids) {
      out += " [" + std::to_string(gid.index) + "] " + gid.text() + (gid.is_roce_v2 ? " RoCE v2" : "");
    }
    is_any_active |= device.is_active;
  }
  if (!is_any_active) {
    return Status(Code::kTransportUnavailable, "no RDMA device has an active port: " + out);
  }
  return out;
}

Result<std::unique_ptr<Transport>> make_transport(TransportHost& host) {
  Result<std::vector<std::shared_ptr<Device>>> devices = Device::open_all(host.rdma);
  if (!devices.is_ok()) return devices.status();
  std::vector<std::unique_ptr<Rail>> rails;
  for (std::shared_ptr<Device>& device : *devices) {
    if (rails.size() == kMostRails) break;
    Result<std::unique_ptr<Rail>> rail = Rail::open(std::move(device), rails.size());
    if (!rail.is_ok()) return rail.status();
    rails.push_back(rail.take());
  }
  auto transport = std::make_unique<RdmaTransport>(host, std::move(rails));
  if (Status started = transport->start(); !started.is_ok()) return started;
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvzc::rdma

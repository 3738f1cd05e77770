// Set-up of the room of trouble: a transport that wraps another one.

#include <cmath>

#include "transport/fault/factory.h"
#include "transport/fault/fault_channel.h"

namespace kvzc::fault {
namespace {

// Where inner channels report the end of stripes.
class StripeSink final : public OperationSink {
 public:
  explicit StripeSink(Workshop& shop) : shop_(shop) {}
  void retire(Operation& operation, Status status) override {
    auto& stripe = static_cast<Stripe&>(operation);
    stripe.voyage->channel.stripe_ended(stripe, status);
    release_stripe(shop_, stripe);
  }
  void retain(Operation& operation) override { operation.retain(); }
  void release(Operation& operation) override {
    release_stripe(shop_, static_cast<Stripe&>(operation));
  }
  void waited(std::int64_t ns) override { shop_.host.operations.waited(ns); }

 private:
  Workshop& shop_;
};

// Where inner channels report what comes from their peers: their token is the FaultChannel.
class PeerRelay final : public PeerSink {
 public:
  void arrived(std::uint64_t token, std::string_view tag, Code code) override {
    reinterpret_cast<FaultChannel*>(token)->arrived(tag, code);
  }
  void channel_lost(std::uint64_t token) override {
    reinterpret_cast<FaultChannel*>(token)->inner_lost();
  }
};

class FaultChannelHalf final : public ChannelHalf {
 public:
  FaultChannelHalf(Workshop& shop, std::unique_ptr<ChannelHalf> inner)
      : shop_(shop), inner_(std::move(inner)) {}

  Result<Blob> offer() override { return inner_->offer(); }

  Result<std::unique_ptr<Channel>> join(Blob peer_offer, const ChannelPeer& peer) override {
    auto channel = std::make_unique<FaultChannel>(shop_, peer.token);
    ChannelPeer relayed = peer;
    relayed.token = reinterpret_cast<std::uint64_t>(channel.get());
    Result<std::unique_ptr<Channel>> inner = inner_->join(std::move(peer_offer), relayed);
    if (!inner.is_ok()) return inner.status();
    channel->set_inner(inner.take());
    return std::unique_ptr<Channel>(std::move(channel));
  }

 private:
  Workshop& shop_;
  std::unique_ptr<ChannelHalf> inner_;
};

class FaultTransport final : public Transport {
 public:
  FaultTransport(TransportHost& host, const FaultOptions& options)
      : shop_(host, options),
        stripes_(shop_),
        inner_host_{host.doorbell, host.fences, stripes_, peers_, host.tuning, host.rdma} {}
  ~FaultTransport() override { end_everything(); }

  Status start(const MakeInner& make_inner) {
    const FaultOptions& options = shop_.options;
    const bool detects = options.vanish_after_posts != 0 && std::isfinite(options.detection_seconds);
    if (options.most_delay_seconds > 0 || detects) {
      Status started = shop_.timer.start();
      if (!started.is_ok()) return started;
    }
    Result<std::unique_ptr<Transport>> inner = make_inner(inner_host_);
    if (!inner.is_ok()) return inner.status();
    inner_ = inner.take();
    return Status::ok();
  }

  const char* name() const override { return inner_->name(); }
  bool is_local() const override { return inner_->is_local(); }

  bool enforces_access() const override { return inner_->enforces_access(); }
  Result<Blob> describe(const MemoryPiece& piece, Access access) override {
    return inner_->describe(piece, access);
  }

  Result<std::shared_ptr<RemoteMemory>> import_memory(Blob description, std::uint64_t nbytes,
                                                      const PeerProcess& owner) override {
    return inner_->import_memory(std::move(description), nbytes, owner);
  }

  Result<std::unique_ptr<ChannelHalf>> open_channel() override {
    Result<std::unique_ptr<ChannelHalf>> inner = inner_->open_channel();
    if (!inner.is_ok()) return inner.status();
    return std::unique_ptr<ChannelHalf>(std::make_unique<FaultChannelHalf>(shop_, inner.take()));
  }

  Status prepare(const MemoryPiece& piece) override { return inner_->prepare(piece); }

  bool stop(std::int64_t deadline_ns) override {
    end_everything();
    return inner_->stop(deadline_ns);
  }

 private:
  void end_everything() {
    shop_.timer.stop();
    std::vector<FaultChannel::Stranded> stranded;
    {
      const MutexLock lock(shop_.mutex);
      for (FaultChannel* channel : shop_.channels) {
        channel->strand_all(Status(Code::kClosed, "the engine is closed"), &stranded);
      }
    }
    FaultChannel::end_all(shop_, stranded);
  }

  Workshop shop_;
  StripeSink stripes_;
  PeerRelay peers_;
  TransportHost inner_host_;
  std::unique_ptr<Transport> inner_;
};

}  // namespace

Result<std::unique_ptr<Transport>> make_transport(TransportHost& host, const FaultOptions& options,
                                                  const MakeInner& make_inner) {
  Status right = check(options);
  if (!right.is_ok()) return right;
  auto transport = std::make_unique<FaultTransport>(host, options);
  Status started = transport->start(make_inner);
  if (!started.is_ok()) return started;
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvzc::fault

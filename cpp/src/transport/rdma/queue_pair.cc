#include "transport/rdma/queue_pair.h"

#include <errno.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "base/sha256.h"

namespace kvzc::rdma {
namespace {

constexpr std::uint32_t kWantedInline = kMessageBytes;

// Two addresses by which the ends may reach each other; both sides rate a pair alike, whoever
// looks.
struct GidPair {
  const Gid* ours;
  const Gid* theirs;
};

std::size_t equal_bits(const GidBytes& a, const GidBytes& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto different = static_cast<std::uint8_t>(a[i] ^ b[i]);
    if (different != 0) return 8 * i + static_cast<std::size_t>(std::countl_zero(different));
  }
  return 8 * a.size();
}

// Prefers RoCE v2, IPv4, addresses that are more than local to the link, and then those that agree
// most: the nearest network.
auto rate(const GidPair& pair) {
  const auto& [ours, theirs] = pair;
  return std::tuple(ours->is_roce_v2, ours->is_ipv4(), !ours->is_link_local(),
                    equal_bits(ours->bytes, theirs->bytes),
                    std::min(ours->bytes, theirs->bytes), std::max(ours->bytes, theirs->bytes));
}

// Gives the pair that is rated highest. An address that two hosts have leads from neither to the other:
// a bridge that every host numbers alike, or one that moves between hosts. Then another pair is taken,
// if there is one; a link-local address is none, for every port has that, also one that leads nowhere.
std::optional<GidPair> choose(const std::vector<Gid>& ours, const std::vector<Gid>& theirs,
                              bool is_same_host) {
  std::optional<GidPair> best, other;
  const auto take = [](std::optional<GidPair>& into, const GidPair& pair) {
    if (!into || rate(pair) > rate(*into)) into = pair;
  };
  for (const Gid& a : ours) {
    for (const Gid& b : theirs) {
      if (a.is_roce_v2 != b.is_roce_v2 || a.is_ipv4() != b.is_ipv4() ||
          a.is_link_local() != b.is_link_local()) {
        continue;
      }
      take(best, {&a, &b});
      if (a.bytes != b.bytes && !a.is_link_local()) take(other, {&a, &b});
    }
  }
  const bool is_shared = best && !is_same_host && best->ours->bytes == best->theirs->bytes;
  return is_shared && other ? other : best;
}

std::string addresses(const std::vector<Gid>& gids) {
  std::string out;
  for (const Gid& gid : gids) out += (out.empty() ? "" : ", ") + gid.text();
  return out.empty() ? "none" : out;
}

}  // namespace

Result<std::unique_ptr<QueuePair>> QueuePair::make(Rail& rail, CompletionTarget* target,
                                                   const RdmaOptions& options) {
  const Device& device = rail.device();
  const ibv::Verbs& verbs = device.verbs();
  std::unique_ptr<QueuePair> out(new QueuePair(rail));
  out->options_ = options;
  out->depth_ = std::bit_floor(std::clamp<std::uint32_t>(
      std::min(options.queue_depth, static_cast<std::uint32_t>(device.limits().max_qp_wr)), 64, 8192));
  out->completions_ = out->depth_ + kReceives;
  Result<std::uint32_t> number = rail.add(target, out->completions_);
  if (!number.is_ok()) return number.status();
  out->number_ = *number;

  ibv_qp_init_attr wanted{};
  wanted.qp_type = IBV_QPT_RC;
  wanted.send_cq = wanted.recv_cq = rail.queue();
  wanted.cap.max_send_wr = out->depth_;
  wanted.cap.max_recv_wr = kReceives;
  wanted.cap.max_send_sge = std::min<std::uint32_t>(
      kMostSges, static_cast<std::uint32_t>(std::max(device.limits().max_sge, 1)));
  wanted.cap.max_recv_sge = 1;
  // What a device takes inline it does not say beforehand.
  for (std::uint32_t inline_bytes = kWantedInline;; inline_bytes /= 2) {
    ibv_qp_init_attr asked = wanted;
    asked.cap.max_inline_data = inline_bytes;
    out->pair_ = verbs.create_qp(device.domain(), &asked);
    if (out->pair_ != nullptr) {
      out->most_inline_ = asked.cap.max_inline_data;
      out->most_sges_ = std::min(kMostSges, std::max(asked.cap.max_send_sge, 1u));
      break;
    }
    if (inline_bytes == 0 || (errno != EINVAL && errno != ENOMEM)) {
      const int error = errno;
      if (error == ENOMEM || error == ENOSPC || error == EAGAIN) {
        return Status(Code::kLimitExceeded,
                      "a queue pair on " + device.info().name + ": " + std::strerror(error) +
                          "; it has room for " + std::to_string(device.limits().max_qp) +
                          " queue pairs, and the process may lock memory up to RLIMIT_MEMLOCK "
                          "(ulimit -l)");
      }
      return Status::system(error, "a queue pair on " + device.info().name);
    }
  }
  out->ring_.resize(out->depth_);
  out->ring_mask_ = out->depth_ - 1;
  out->buffer_ = std::make_unique<Buffer>();
  Result<std::shared_ptr<Registration>> keys = Registration::make(
      rail.shared_device(),
      MemoryPiece{reinterpret_cast<std::byte*>(out->buffer_.get()), sizeof(Buffer)}, Access::kGet);
  if (!keys.is_ok()) return keys.status();
  out->keys_ = keys.take();
  for (std::uint16_t slot = 0; slot < kReceives; ++slot) out->free_slots_.push_back(slot);
  // Random, so that late packets of an earlier pair of the same number are not taken for ours.
  std::array<std::byte, 4> drawn{};
  if (Status filled = fill_random(drawn); !filled.is_ok()) return filled;
  std::memcpy(&out->first_packet_, drawn.data(), sizeof drawn);
  out->first_packet_ &= 0xffffff;

  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_INIT;
  to.pkey_index = 0;
  to.port_num = device.info().port;
  to.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (const int error = verbs.modify_qp(
          out->pair_, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
      error != 0) {
    return Status::system(error, "initialising a queue pair on " + device.info().name);
  }
  for (std::uint32_t slot = 0; slot < kReceives; ++slot) out->repost(slot);
  out->consumed_ = out->told_consumed_ = 0;
  out->posted_receives_ = kReceives;
  return out;
}

QueuePair::~QueuePair() {
  leave();
  // The device is done with the buffers before these go.
  if (pair_ != nullptr) rail_.device().verbs().destroy_qp(pair_);
}

QueuePairAddress QueuePair::address() const {
  const DeviceInfo& info = rail_.device().info();
  QueuePairAddress out;
  out.number = pair_->qp_num;
  out.first_packet = first_packet_;
  out.lid = info.lid;
  out.mtu = static_cast<std::uint8_t>(info.active_mtu);
  out.most_reads = static_cast<std::uint8_t>(std::clamp(rail_.device().limits().max_qp_rd_atom, 1, 255));
  out.is_ethernet = info.is_ethernet;
  out.acknowledges_after_store = info.is_software;
  out.flush_address = reinterpret_cast<std::uint64_t>(&buffer_->flush_source);
  out.flush_key = keys_->parts()[0]->rkey;
  for (const Gid& gid : info.gids) {
    if (options_.gid_index < 0 || options_.gid_index == gid.index) out.gids.push_back(gid);
  }
  return out;
}

Status QueuePair::connect(const QueuePairAddress& peer, bool is_same_host) {
  const DeviceInfo& info = rail_.device().info();
  const ibv_device_attr& limits = rail_.device().limits();
  const ibv::Verbs& verbs = rail_.device().verbs();
  const QueuePairAddress own = address();
  if (peer.is_ethernet != info.is_ethernet) {
    return Status(Code::kTransportUnavailable,
                  "rail " + std::to_string(rail_.index()) + " (" + info.name +
                      "): one side is Ethernet, the other InfiniBand; name the devices in the same "
                      "order on both sides");
  }
  const std::optional<GidPair> gids = choose(own.gids, peer.gids, is_same_host);
  if (info.is_ethernet && !gids) {
    return Status(Code::kTransportUnavailable,
                  "rail " + std::to_string(rail_.index()) + " (" + info.name +
                      "): no address of ours (" + addresses(own.gids) +
                      ") is of the same kind as one of the peer's (" + addresses(peer.gids) +
                      "); give both ports an IPv4 address, or choose with gid_index");
  }
  if (gids && !is_same_host && gids->ours->bytes == gids->theirs->bytes) {
    return Status(Code::kTransportUnavailable,
                  "rail " + std::to_string(rail_.index()) + " (" + info.name +
                      "): another host has our address " + gids->ours->text() +
                      "; it is not one that leads from host to host. Name the devices that do, "
                      "Rdma(devices=[...])");
  }
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_RTR;
  to.path_mtu = std::min(info.active_mtu, static_cast<ibv_mtu>(peer.mtu));
  to.dest_qp_num = peer.number;
  to.rq_psn = peer.first_packet;
  to.max_dest_rd_atomic = own.most_reads;
  to.min_rnr_timer = 12;
  to.ah_attr.port_num = info.port;
  to.ah_attr.sl = options_.service_level;
  to.ah_attr.dlid = peer.lid;
  if (gids && (info.is_ethernet || peer.lid == 0)) {
    to.ah_attr.is_global = 1;
    std::memcpy(to.ah_attr.grh.dgid.raw, gids->theirs->bytes.data(), sizeof(GidBytes));
    to.ah_attr.grh.sgid_index = gids->ours->index;
    to.ah_attr.grh.hop_limit = 64;
    to.ah_attr.grh.traffic_class = options_.traffic_class;
  }
  if (const int error =
          verbs.modify_qp(pair_, &to,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                              IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
      error != 0) {
    return Status(Code::kTransportUnavailable,
                  "rail " + std::to_string(rail_.index()) + " (" + info.name + "): no way from " +
                      (gids ? gids->ours->text() + " to " + gids->theirs->text() : "here") + ": " +
                      std::strerror(error));
  }
  to.qp_state = IBV_QPS_RTS;
  to.sq_psn = first_packet_;
  to.timeout = options_.ack_timeout;
  to.retry_cnt = options_.retries;
  to.rnr_retry = 7;
  to.max_rd_atomic = static_cast<std::uint8_t>(
      std::clamp<int>(std::min<int>(limits.max_qp_init_rd_atom, peer.most_reads), 1, 255));
  if (const int error =
          verbs.modify_qp(pair_, &to,
                          IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                              IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
      error != 0) {
    return Status::system(error, "connecting a queue pair on " + info.name);
  }
  must_flush_ = options_.always_flush || !peer.acknowledges_after_store;
  flush_address_ = peer.flush_address;
  flush_key_ = peer.flush_key;
  path_ = info.name + (gids ? " (" + gids->ours->text() + " to " + gids->theirs->text() + ")" : "");
  is_connected_ = true;
  return Status::ok();
}

// --- Posting ---

void QueuePair::add_flush(const Piece& piece) {
  ibv_send_wr& request = next_request(Posted::Kind::kFlush, piece);
  ibv_sge& sge = sges_[batched_ - 1][0];
  sge.addr = reinterpret_cast<std::uint64_t>(&buffer_->flush_target);
  sge.length = sizeof(std::uint32_t);
  sge.lkey = keys_->local_key(0);
  request.sg_list = &sge;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_READ;
  request.wr.rdma.remote_addr = flush_address_;
  request.wr.rdma.rkey = flush_key_;
}

void QueuePair::add_message(const Message& message, Progress* progress) {
  const std::uint16_t number = free_slots_.back();
  free_slots_.pop_back();
  Message& slot = buffer_->sends[number];
  std::memcpy(&slot, &message, message.nbytes());
  ibv_send_wr& request = next_request(Posted::Kind::kMessage, {.progress = progress}, number);
  ibv_sge& sge = sges_[batched_ - 1][0];
  sge.addr = reinterpret_cast<std::uint64_t>(&slot);
  sge.length = static_cast<std::uint32_t>(message.nbytes());
  sge.lkey = keys_->local_key(0);
  request.sg_list = &sge;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  // Wakes the peer's poller also where completions do not.
  request.send_flags |= IBV_SEND_SOLICITED;
  if (message.nbytes() <= most_inline_) request.send_flags |= IBV_SEND_INLINE;
  ++sent_messages_;
}

bool QueuePair::post_batch() {
  // Somebody waits for the last one of each batch, and an unsignalled one says nothing.
  requests_[batched_ - 1].send_flags |= IBV_SEND_SIGNALED;
  requests_[batched_ - 1].next = nullptr;
  const std::uint32_t count = std::exchange(batched_, 0u);
  ibv_send_wr* refused = nullptr;
  if (!is_broken_) {
    const int error = ibv_post_send(pair_, requests_.data(), &refused);
    if (error == 0) return true;
    refusal_ = error;
  }
  // In error the device takes requests only to give them back; what it did not even take comes back by
  // nobody, so the channel hears of it from the receives that are flushed.
  if (refused == nullptr) refused = requests_.data();
  const auto taken = static_cast<std::uint32_t>(refused - requests_.data());
  refused_ += count - taken;
  must_mark_ |= taken > 0;
  break_off();
  mark();
  return false;
}

// Of what it took before, the last ones may have gone well without a word: nobody had marked them as
// the last. What is posted in error comes back behind them.
void QueuePair::mark() {
  if (!must_mark_) return;
  ibv_send_wr request{};
  request.wr_id = std::uint64_t{number_} << 32 | (last_ - refused_ - 1);
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* refused = nullptr;
  must_mark_ = ibv_post_send(pair_, &request, &refused) != 0;
}

void QueuePair::repost(std::uint32_t slot) {
  ++consumed_;
  ibv_sge sge{};
  sge.addr = reinterpret_cast<std::uint64_t>(&buffer_->receives[slot]);
  sge.length = sizeof(Message);
  sge.lkey = keys_->local_key(0);
  ibv_recv_wr request{};
  request.wr_id = kReceiveBit | std::uint64_t{number_} << 32 | slot;
  request.sg_list = &sge;
  request.num_sge = 1;
  ibv_recv_wr* refused = nullptr;
  if (ibv_post_recv(pair_, &request, &refused) != 0) {
    ++flushed_receives_;
    if (is_connected_) break_off();
  }
}

void QueuePair::break_off() {
  if (std::exchange(is_broken_, true)) return;
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_ERR;
  (void)rail_.device().verbs().modify_qp(pair_, &to, IBV_QP_STATE);
}

}  // namespace kvzc::rdma

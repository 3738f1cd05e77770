#include "cpp/rdma/raw_pair.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cpp/harness.h"

namespace kvzc::bench {
namespace {

constexpr std::uint32_t kReceives = 16;
constexpr std::uint32_t kInline = 64;
constexpr std::uint32_t kPatience = 2000;  // Empty polls: longer than hardware takes.
constexpr std::uint32_t kFirstPacket = 0x1234;

void check(bool is_good, const char* what) {
  if (!is_good) die(std::string(what) + ": " + std::strerror(errno));
}

std::shared_ptr<rdma::Device> open(const std::string& name) {
  RdmaOptions options;
  options.devices = {name};
  return take(rdma::Device::open_all(options))[0];
}

}  // namespace

RawPair::RawPair(const std::string& device, std::span<std::byte> memory)
    : verbs_(*take(ibv::load())), device_(open(device)), memory_(memory) {
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  // What kvzc would choose too.
  for (const rdma::Gid& gid : info().gids) {
    if (gid.is_roce_v2 && gid.is_ipv4()) gid_ = gid;
  }
  keys_ = verbs_.reg_mr(device_->domain(), memory.data(), memory.size(), kAccess);
  received_keys_ = verbs_.reg_mr(device_->domain(), received_, sizeof received_, kAccess);
  sends_ = verbs_.create_cq(device_->context(), kDepth, nullptr, nullptr, 0);
  receives_ = verbs_.create_cq(device_->context(), kReceives, nullptr, nullptr, 0);
  check(keys_ && received_keys_ && sends_ && receives_, "bare verbs");
  ibv_qp_init_attr wanted{};
  wanted.qp_type = IBV_QPT_RC;
  wanted.send_cq = sends_;
  wanted.recv_cq = receives_;
  wanted.cap = {kDepth, kReceives, 1, 1, kInline};
  pair_ = verbs_.create_qp(device_->domain(), &wanted);
  check(pair_ != nullptr, "a bare queue pair");
}

RawPair::~RawPair() {
  verbs_.destroy_qp(pair_);
  verbs_.destroy_cq(receives_);
  verbs_.destroy_cq(sends_);
  verbs_.dereg_mr(received_keys_);
  verbs_.dereg_mr(keys_);
}

RawPair::Address RawPair::address() const {
  return {pair_->qp_num, info().lid, gid_.bytes, reinterpret_cast<std::uint64_t>(memory_.data()),
          keys_->rkey};
}

void RawPair::connect(const Address& peer) {
  peer_ = peer;
  const RdmaOptions options;  // The timeouts and retries of kvzc.
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_INIT;
  to.port_num = info().port;
  to.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  check(verbs_.modify_qp(pair_, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                                         IBV_QP_ACCESS_FLAGS) == 0,
        "initialising");
  for (std::uint32_t i = 0; i < kReceives; ++i) post_receive();
  to.qp_state = IBV_QPS_RTR;
  to.path_mtu = info().active_mtu;
  to.dest_qp_num = peer.number;
  to.rq_psn = kFirstPacket;
  to.max_dest_rd_atomic = 1;
  to.min_rnr_timer = 12;
  to.ah_attr.port_num = info().port;
  to.ah_attr.dlid = peer.lid;
  to.ah_attr.is_global = info().is_ethernet;
  std::memcpy(to.ah_attr.grh.dgid.raw, peer.gid.data(), peer.gid.size());
  to.ah_attr.grh.sgid_index = gid_.index;
  to.ah_attr.grh.hop_limit = 64;
  check(verbs_.modify_qp(pair_, &to, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                         IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                         IBV_QP_MIN_RNR_TIMER) == 0,
        "connecting");
  to.qp_state = IBV_QPS_RTS;
  to.sq_psn = kFirstPacket;
  to.timeout = options.ack_timeout;
  to.retry_cnt = options.retries;
  to.rnr_retry = 7;
  to.max_rd_atomic = 1;
  check(verbs_.modify_qp(pair_, &to, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
                                         IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                         IBV_QP_MAX_QP_RD_ATOMIC) == 0,
        "connecting");
}

ibv_send_wr RawPair::write_of(const Piece& piece, ibv_sge* sge) const {
  *sge = {reinterpret_cast<std::uint64_t>(memory_.data()) + piece.source,
          static_cast<std::uint32_t>(piece.nbytes), keys_->lkey};
  ibv_send_wr request{};
  request.sg_list = sge;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_WRITE;
  if (piece.nbytes <= kInline) request.send_flags = IBV_SEND_INLINE;
  request.wr.rdma.remote_addr = peer_.memory + piece.target;
  request.wr.rdma.rkey = peer_.key;
  return request;
}

void RawPair::post(ibv_send_wr* first) {
  ibv_send_wr* refused = nullptr;
  check(ibv_post_send(pair_, first, &refused) == 0, "ibv_post_send");
}

bool RawPair::poll(ibv_cq* queue) {
  ibv_wc completion;
  const int count = ibv_poll_cq(queue, 1, &completion);
  if (count > 0 && completion.status != IBV_WC_SUCCESS) {
    die(std::string("bare verbs: ") + verbs_.wc_status_str(completion.status));
  }
  empty_polls_ = count > 0 ? 0 : empty_polls_ + 1;
  if (empty_polls_ >= kPatience) sched_yield();
  return count > 0;
}

void RawPair::write(std::span<const Piece> pieces, std::size_t batch) {
  ibv_send_wr requests[kBatch];
  ibv_sge sges[kBatch];
  std::size_t posted = 0;
  std::size_t batches_under_way = 0;
  while (posted < pieces.size() || batches_under_way > 0) {
    if (posted == pieces.size() || batches_under_way == kDepth / batch) {
      if (poll(sends_)) --batches_under_way;
      continue;
    }
    const std::size_t count = std::min(batch, pieces.size() - posted);
    for (std::size_t i = 0; i < count; ++i) {
      requests[i] = write_of(pieces[posted + i], &sges[i]);
      if (i > 0) requests[i - 1].next = &requests[i];
    }
    requests[count - 1].send_flags |= IBV_SEND_SIGNALED;
    post(requests);
    posted += count;
    ++batches_under_way;
  }
}

void RawPair::write_and_send(const Piece& piece) {
  while (!is_sent_) is_sent_ = poll(sends_);
  ibv_sge sges[2];
  ibv_send_wr requests[2] = {write_of(piece, &sges[0]), {}};
  requests[0].next = &requests[1];
  sges[1] = {reinterpret_cast<std::uint64_t>(memory_.data()), kSendBytes, keys_->lkey};
  requests[1].sg_list = &sges[1];
  requests[1].num_sge = 1;
  requests[1].opcode = IBV_WR_SEND;
  requests[1].send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
  post(requests);
  is_sent_ = false;
}

void RawPair::receive() {
  while (!poll(receives_)) {
  }
  post_receive();
}

void RawPair::post_receive() {
  ibv_sge sge{reinterpret_cast<std::uint64_t>(received_), kSendBytes, received_keys_->lkey};
  ibv_recv_wr request{};
  request.sg_list = &sge;
  request.num_sge = 1;
  ibv_recv_wr* refused = nullptr;
  check(ibv_post_recv(pair_, &request, &refused) == 0, "ibv_post_recv");
}

}  // namespace kvzc::bench

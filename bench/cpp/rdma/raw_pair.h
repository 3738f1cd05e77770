// RawPair: one reliable connection by bare verbs, as the simplest program would use it: the floor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "drivers/ibv/ibv.h"
#include "transport/rdma/device.h"

namespace kvzc::bench {

class RawPair {
 public:
  static constexpr std::uint32_t kDepth = 128;
  static constexpr std::uint32_t kBatch = 32;
  static constexpr std::uint32_t kSendBytes = 32;

  // Opens the device a second time and registers `memory`, which both ends write from and into.
  RawPair(const std::string& device, std::span<std::byte> memory);
  ~RawPair();
  RawPair(const RawPair&) = delete;
  RawPair& operator=(const RawPair&) = delete;

  struct Address {
    std::uint32_t number;
    std::uint16_t lid;
    rdma::GidBytes gid;
    std::uint64_t memory;
    std::uint32_t key;
  };
  Address address() const;
  void connect(const Address& peer);
  const rdma::DeviceInfo& info() const { return device_->info(); }
  std::uint8_t gid_index() const { return gid_.index; }

  struct Piece {
    std::uint64_t source, target, nbytes;  // Offsets in the memory here and there.
  };
  // Writes all, kDepth of them under way; returns when the last one is acknowledged. A batch is
  // posted at once, and its last one is signalled.
  void write(std::span<const Piece> pieces, std::size_t batch = kBatch);
  // Writes and sends a message behind it, in one post.
  void write_and_send(const Piece& piece);
  // Returns when a message has come; posts its receive again.
  void receive();

 private:
  ibv_send_wr write_of(const Piece& piece, ibv_sge* sge) const;
  void post(ibv_send_wr* first);
  // Gives whether something had completed. Called in a loop: leaves the core to the device now and
  // then, which needs it where it is software.
  bool poll(ibv_cq* queue);
  void post_receive();

  const ibv::Verbs& verbs_;
  std::shared_ptr<rdma::Device> device_;
  rdma::Gid gid_;
  std::span<std::byte> memory_;
  std::byte received_[kSendBytes]{};
  ibv_mr* keys_ = nullptr;
  ibv_mr* received_keys_ = nullptr;
  ibv_cq* sends_ = nullptr;
  ibv_cq* receives_ = nullptr;
  ibv_qp* pair_ = nullptr;
  bool is_sent_ = true;  // What write_and_send() posted has completed.
  std::uint32_t empty_polls_ = 0;  // In a row.
  Address peer_{};
};

}  // namespace kvzc::bench

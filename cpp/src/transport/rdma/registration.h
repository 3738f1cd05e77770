// Registration: the keys of one piece of local memory on one device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvzc/transport.h"
#include "transport/rdma/device.h"

namespace kvzc::rdma {

// One key for all of it, or several where the device takes no more at once: the key of a byte is
// that of number offset / part_bytes.
class Registration {
 public:
  // Pins the memory. Errors: kLimitExceeded with what was asked, what is allowed and the remedy.
  static Result<std::shared_ptr<Registration>> make(const std::shared_ptr<Device>& device,
                                                    const MemoryPiece& piece, Access access);
  // Device memory that the kernel exports as a dma-buf. Errors: kUnsupported with the reason.
  static Result<std::shared_ptr<Registration>> make_of_dmabuf(const std::shared_ptr<Device>& device,
                                                              int dmabuf, std::uint64_t nbytes);
  // Gives the registration that is kept with `piece`, made at the first call. Its keys give a peer
  // no more than `access`; this side may read and write in any case.
  static Result<std::shared_ptr<Registration>> of(const std::shared_ptr<Device>& device,
                                                  const MemoryPiece& piece, Access access);

  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  std::uint64_t part_bytes() const { return part_bytes_; }
  const std::vector<ibv_mr*>& parts() const { return parts_; }
  std::uint32_t local_key(std::uint64_t offset) const {
    return parts_[is_whole() ? 0 : offset / part_bytes_]->lkey;
  }
  bool is_whole() const { return parts_.size() == 1; }
  std::byte* data() const { return data_; }
  // Says whether the memory lies on the NUMA node of the device; true where either is not known.
  bool is_near() const { return is_near_; }

 private:
  explicit Registration(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  const std::shared_ptr<Device> device_;
  std::byte* data_ = nullptr;
  std::uint64_t part_bytes_ = 0;
  bool is_near_ = true;
  std::vector<ibv_mr*> parts_;
};

}  // namespace kvzc::rdma

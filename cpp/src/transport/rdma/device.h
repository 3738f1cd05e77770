// Device: one opened RDMA device with the port that is used of it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "drivers/ibv/ibv.h"
#include "kvzc/status.h"
#include "kvzc/transport.h"

namespace kvzc::rdma {

using GidBytes = std::array<std::uint8_t, 16>;

// One of the addresses of a port.
struct Gid {
  std::uint8_t index = 0;
  bool is_roce_v2 = false;
  GidBytes bytes{};

  bool is_ipv4() const;
  bool is_link_local() const;
  // "10.9.0.1" or "fe80:0:...".
  std::string text() const;
};

// What a device is and how it is used. A value.
struct DeviceInfo {
  std::string name;
  std::uint8_t port = 0;
  bool is_ethernet = true;  // RoCE; else InfiniBand.
  bool is_software = false;  // No hardware behind it: Soft-RoCE, Soft-iWARP.
  bool is_active = false;
  std::uint16_t lid = 0;
  ibv_mtu active_mtu = IBV_MTU_1024;
  int numa_node = -1;
  std::vector<Gid> gids;
};

class Device {
 public:
  // Opens what `options` names, in that order, or else every device that has an active port.
  // Errors: kTransportUnavailable with the reason; kInvalidArgument for a name there is not.
  static Result<std::vector<std::shared_ptr<Device>>> open_all(const RdmaOptions& options);
  // Says what is there, without keeping anything open.
  static Result<std::vector<DeviceInfo>> list();

  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const ibv::Verbs& verbs() const { return verbs_; }
  const DeviceInfo& info() const { return info_; }
  const ibv_device_attr& limits() const { return limits_; }
  ibv_context* context() const { return context_; }
  ibv_pd* domain() const { return domain_; }

 private:
  Device(const ibv::Verbs& verbs, ibv_context* context) : verbs_(verbs), context_(context) {}
  static Result<std::shared_ptr<Device>> open(const ibv::Verbs& verbs, ibv_device* device);
  Status look();
  void look_at_gids(std::uint8_t port, int places);

  const ibv::Verbs& verbs_;
  ibv_context* const context_;
  ibv_pd* domain_ = nullptr;
  DeviceInfo info_;
  ibv_device_attr limits_{};
};

}  // namespace kvzc::rdma

#include "transport/rdma/device.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvzc::rdma {
namespace {

// Gives the first line of a file, or nothing.
std::string line_of(const std::string& path) {
  std::string out;
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return out;
  char line[256];
  if (std::fgets(line, sizeof line, file) != nullptr) out = line;
  std::fclose(file);
  while (!out.empty() && (out.back() == '\n' || out.back() == ' ')) out.pop_back();
  return out;
}

std::string sysfs(const ibv_device* device) {
  return std::string("/sys/class/infiniband/") + device->name;
}

// A list of devices as long as it is looked at.
class DeviceList {
 public:
  explicit DeviceList(const ibv::Verbs& verbs)
      : verbs_(verbs), devices_(verbs.get_device_list(&count_)) {}
  ~DeviceList() {
    if (devices_ != nullptr) verbs_.free_device_list(devices_);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  ibv_device** begin() const { return devices_; }
  ibv_device** end() const { return devices_ == nullptr ? nullptr : devices_ + count_; }

 private:
  const ibv::Verbs& verbs_;
  int count_ = 0;
  ibv_device** devices_;
};

Status no_device(const char* what) {
  return Status(Code::kTransportUnavailable,
                std::string(what) +
                    "; look with `ibv_devinfo` (package ibverbs-utils) and `rdma link` (iproute2); "
                    "Soft-RoCE over an interface: `rdma link add rxe0 type rxe netdev eth0`");
}

}  // namespace

bool Gid::is_ipv4() const {
  static constexpr std::array<std::uint8_t, 12> kMapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(kMapped.begin(), kMapped.end(), bytes.begin());
}

bool Gid::is_link_local() const { return bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80; }

std::string Gid::text() const {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_ipv4()) {
    inet_ntop(AF_INET, bytes.data() + 12, text, sizeof text);
  } else {
    inet_ntop(AF_INET6, bytes.data(), text, sizeof text);
  }
  return text;
}

Result<std::shared_ptr<Device>> Device::open(const ibv::Verbs& verbs, ibv_device* device) {
  ibv_context* context = verbs.open_device(device);
  if (context == nullptr) {
    return Status(Code::kTransportUnavailable,
                  std::string("the device ") + device->name + " cannot be opened: " +
                      std::strerror(errno) +
                      (errno == EACCES || errno == EPERM
                           ? "; this user needs access to /dev/infiniband/uverbs*"
                           : ""));
  }
  std::shared_ptr<Device> out(new Device(verbs, context));
  if (Status looked = out->look(); !looked.is_ok()) return looked;
  out->domain_ = verbs.alloc_pd(context);
  if (out->domain_ == nullptr) {
    return Status::system(errno, "a protection domain on " + out->info_.name);
  }
  return out;
}

Status Device::look() {
  info_.name = context_->device->name;
  const std::string folder = sysfs(context_->device);
  struct stat there {};
  info_.is_software = stat((folder + "/device").c_str(), &there) != 0;
  const std::string node = line_of(folder + "/device/numa_node");
  if (!node.empty()) info_.numa_node = std::atoi(node.c_str());
  if (int error = verbs_.query_device(context_, &limits_); error != 0) {
    return Status::system(error, "asking " + info_.name + " for its limits");
  }
  for (std::uint8_t port = 1; port <= limits_.phys_port_cnt; ++port) {
    ibv_port_attr attributes{};
    if (verbs_.query_port(context_, port, &attributes) != 0) continue;
    const bool is_active = attributes.state == IBV_PORT_ACTIVE;
    if (info_.port != 0 && !is_active) continue;
    info_.port = port;
    info_.is_active = is_active;
    info_.is_ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
    info_.lid = attributes.lid;
    info_.active_mtu = attributes.active_mtu;
    look_at_gids(port, std::min<int>(attributes.gid_tbl_len, 256));
    if (is_active) break;
  }
  return Status::ok();
}

void Device::look_at_gids(std::uint8_t port, int places) {
  info_.gids.clear();
  const auto add = [this](std::uint32_t index, bool is_roce_v2, const ibv_gid& raw) {
    Gid gid;
    gid.index = static_cast<std::uint8_t>(index);
    gid.is_roce_v2 = is_roce_v2;
    std::memcpy(gid.bytes.data(), raw.raw, gid.bytes.size());
    info_.gids.push_back(gid);
  };
  if (verbs_.query_gid_table != nullptr) {
    std::vector<ibv_gid_entry> entries(1024);
    const ssize_t count =
        verbs_.query_gid_table(context_, entries.data(), entries.size(), 0, sizeof entries[0]);
    for (ssize_t i = 0; i < count; ++i) {
      const ibv_gid_entry& each = entries[static_cast<std::size_t>(i)];
      if (each.port_num != port || each.gid_index >= 256) continue;
      add(each.gid_index, each.gid_type == IBV_GID_TYPE_ROCE_V2, each.gid);
    }
    return;
  }
  const std::string types = sysfs(context_->device) + "/ports/" + std::to_string(port) + "/gid_attrs/types/";
  for (int i = 0; i < places; ++i) {
    // An empty place has no type.
    const std::string type = line_of(types + std::to_string(i));
    ibv_gid raw{};
    if (type.empty() || verbs_.query_gid(context_, port, i, &raw) != 0) continue;
    add(static_cast<std::uint32_t>(i), type == "RoCE v2", raw);
  }
}

Device::~Device() {
  if (domain_ != nullptr) verbs_.dealloc_pd(domain_);
  verbs_.close_device(context_);
}

Result<std::vector<std::shared_ptr<Device>>> Device::open_all(const RdmaOptions& options) {
  Result<const ibv::Verbs*> verbs = ibv::load();
  if (!verbs.is_ok()) return verbs.status();
  const DeviceList list(**verbs);
  std::vector<std::shared_ptr<Device>> out;
  if (!options.devices.empty()) {
    for (const std::string& name : options.devices) {
      const auto found = std::find_if(list.begin(), list.end(), [&](const ibv_device* device) {
        return name == device->name;
      });
      if (found == list.end()) {
        std::string names;
        for (const ibv_device* device : list) names += std::string(" ") + device->name;
        return Status(Code::kInvalidArgument, "there is no RDMA device '" + name + "'; there are:" +
                                                  (names.empty() ? " none" : names));
      }
      Result<std::shared_ptr<Device>> device = open(**verbs, *found);
      if (!device.is_ok()) return device.status();
      out.push_back(device.take());
    }
    return out;
  }
  Status why = no_device("there is no RDMA device");
  for (ibv_device* each : list) {
    Result<std::shared_ptr<Device>> device = open(**verbs, each);
    if (!device.is_ok()) {
      why = device.status();
    } else if (!(*device)->info().is_active) {
      why = no_device("no RDMA device has an active port");
    } else {
      out.push_back(device.take());
    }
  }
  if (out.empty()) return why;
  return out;
}

Result<std::vector<DeviceInfo>> Device::list() {
  Result<const ibv::Verbs*> verbs = ibv::load();
  if (!verbs.is_ok()) return verbs.status();
  std::vector<DeviceInfo> out;
  for (ibv_device* each : DeviceList(**verbs)) {
    Result<std::shared_ptr<Device>> device = open(**verbs, each);
    if (device.is_ok()) out.push_back((*device)->info());
  }
  if (out.empty()) return no_device("there is no RDMA device");
  return out;
}

}  // namespace kvzc::rdma

#include "drivers/ibv/ibv.h"

#include <dlfcn.h>

#include <cstdint>
#include <string>

namespace kvzc::ibv {
namespace {

// IBV_FORK_UNNEEDED, which headers before version 35 of rdma-core do not have.
constexpr int kForkUnneeded = 2;

// Kept for the life of the process: devices may outlive every engine.
struct Library {
  void* handle = nullptr;
  Verbs verbs{};
  std::string missing;  // Names a function that is not there; empty: all are.
  std::string error;

  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function == nullptr && missing.empty()) missing = name;
  }

  Library() {
    handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* why = dlerror();
      error = why == nullptr ? "unknown" : why;
      return;
    }
    find(verbs.get_device_list, "ibv_get_device_list");
    find(verbs.free_device_list, "ibv_free_device_list");
    find(verbs.get_device_name, "ibv_get_device_name");
    find(verbs.get_device_guid, "ibv_get_device_guid");
    find(verbs.open_device, "ibv_open_device");
    find(verbs.close_device, "ibv_close_device");
    find(verbs.query_device, "ibv_query_device");
    find(verbs.query_port, "ibv_query_port");
    find(verbs.query_gid, "ibv_query_gid");
    find(verbs.alloc_pd, "ibv_alloc_pd");
    find(verbs.dealloc_pd, "ibv_dealloc_pd");
    find(verbs.reg_mr, "ibv_reg_mr");
    find(verbs.dereg_mr, "ibv_dereg_mr");
    find(verbs.create_comp_channel, "ibv_create_comp_channel");
    find(verbs.destroy_comp_channel, "ibv_destroy_comp_channel");
    find(verbs.create_cq, "ibv_create_cq");
    find(verbs.resize_cq, "ibv_resize_cq");
    find(verbs.destroy_cq, "ibv_destroy_cq");
    find(verbs.get_cq_event, "ibv_get_cq_event");
    find(verbs.ack_cq_events, "ibv_ack_cq_events");
    find(verbs.create_qp, "ibv_create_qp");
    find(verbs.modify_qp, "ibv_modify_qp");
    find(verbs.destroy_qp, "ibv_destroy_qp");
    find(verbs.get_async_event, "ibv_get_async_event");
    find(verbs.ack_async_event, "ibv_ack_async_event");
    find(verbs.wc_status_str, "ibv_wc_status_str");
    find(verbs.event_type_str, "ibv_event_type_str");
    find(verbs.fork_init, "ibv_fork_init");
    // Before the first registration: on a kernel before 5.12 a fork() would otherwise take pinned pages
    // away from the parent. Later ones copy them; there it would only take them away from the child,
    // with all that shares a page with them.
    const auto is_fork_initialized =
        reinterpret_cast<int (*)()>(dlsym(handle, "ibv_is_fork_initialized"));
    const bool is_needed = is_fork_initialized == nullptr || is_fork_initialized() != kForkUnneeded;
    if (missing.empty() && is_needed) (void)verbs.fork_init();
    // Not in every version; there is another way, or host memory does without.
    verbs.query_gid_table = reinterpret_cast<decltype(verbs.query_gid_table)>(
        dlsym(handle, "_ibv_query_gid_table"));
    verbs.reg_dmabuf_mr = reinterpret_cast<decltype(verbs.reg_dmabuf_mr)>(
        dlsym(handle, "ibv_reg_dmabuf_mr"));
  }
};

}  // namespace

Result<const Verbs*> load() {
  static const Library library;
  if (library.handle == nullptr) {
    return Status(Code::kTransportUnavailable,
                  "libibverbs.so.1 cannot be opened (" + library.error +
                      "); install libibverbs1 and ibverbs-providers (Debian, Ubuntu), or "
                      "libibverbs (Fedora, RHEL)");
  }
  if (!library.missing.empty()) {
    return Status(Code::kTransportUnavailable, "libibverbs.so.1 has no " + library.missing +
                                                   "; it is too old: install rdma-core 17 or later");
  }
  return &library.verbs;
}

}  // namespace kvzc::ibv

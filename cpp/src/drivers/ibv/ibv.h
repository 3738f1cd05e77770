// The functions of libibverbs, opened at run time: a table without policy.
//
// Built only where <infiniband/verbs.h> was found; what that header has inline (posting, polling)
// is called as it stands there, since it goes through the opened device.
#pragma once

#include <infiniband/verbs.h>

#include "kvzc/status.h"

namespace kvzc::ibv {

struct Verbs {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_get_device_guid) get_device_guid;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  // Fills the part of ibv_port_attr that all versions have.
  int (*query_port)(ibv_context*, std::uint8_t port, ibv_port_attr*);
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::_ibv_query_gid_table) query_gid_table;  // Null: older than version 32 of rdma-core.
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr)(ibv_pd*, void* address, std::size_t nbytes, int access);
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;  // Null: older than version 34 of rdma-core.
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_resize_cq) resize_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
  decltype(&::ibv_wc_status_str) wc_status_str;
  decltype(&::ibv_event_type_str) event_type_str;
  decltype(&::ibv_fork_init) fork_init;
};

// Gives the table, opened at the first call and kept. Errors: kTransportUnavailable, in words that
// name the package. Thread: any.
Result<const Verbs*> load();

}  // namespace kvzc::ibv

#include "cpp/rdma/null_device.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <vector>

#include "base/futex.h"

namespace kvzc::bench {
namespace {

struct Queue : ibv_cq {
  std::atomic<bool> lock{false};  // Guards the rest.
  std::vector<ibv_wc> ring;
  std::size_t first = 0, last = 0;
  bool is_armed = false;
};

class Hold {
 public:
  explicit Hold(Queue& queue) : queue_(queue) {
    while (queue_.lock.exchange(true, std::memory_order_acquire)) cpu_relax();
  }
  ~Hold() { queue_.lock.store(false, std::memory_order_release); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  Queue& queue_;
};

int post_send(ibv_qp* pair, ibv_send_wr* first, ibv_send_wr**) {
  auto& queue = static_cast<Queue&>(*pair->send_cq);
  bool must_tell = false;
  {
    const Hold hold(queue);
    for (const ibv_send_wr* each = first; each != nullptr; each = each->next) {
      if ((each->send_flags & IBV_SEND_SIGNALED) == 0) continue;
      ibv_wc& completion = queue.ring[queue.last++ % queue.ring.size()];
      completion = {};
      completion.wr_id = each->wr_id;
      must_tell = queue.is_armed;
    }
    if (must_tell) queue.is_armed = false;
  }
  const std::uint64_t one = 1;
  if (must_tell) (void)!write(queue.channel->fd, &one, sizeof one);
  return 0;
}

int post_recv(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) { return 0; }

int poll_cq(ibv_cq* of, int most, ibv_wc* out) {
  auto& queue = static_cast<Queue&>(*of);
  const Hold hold(queue);
  int count = 0;
  while (count < most && queue.first != queue.last) {
    out[count++] = queue.ring[queue.first++ % queue.ring.size()];
  }
  return count;
}

int req_notify_cq(ibv_cq* of, int) {
  auto& queue = static_cast<Queue&>(*of);
  const Hold hold(queue);
  queue.is_armed = true;
  return 0;
}

ibv_device* device() {
  static ibv_device the_device = [] {
    ibv_device out{};
    std::snprintf(out.name, sizeof out.name, "%s", kNullDevice);
    return out;
  }();
  return &the_device;
}

}  // namespace

ibv::Verbs null_verbs() {
  ibv::Verbs out{};
  out.get_device_list = [](int* count) {
    *count = 1;
    return new ibv_device* [2] { device(), nullptr };
  };
  out.free_device_list = [](ibv_device** list) { delete[] list; };
  out.open_device = [](ibv_device* from) {
    auto* const context = new ibv_context{};
    context->device = from;
    context->async_fd = eventfd(0, EFD_CLOEXEC);
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    return context;
  };
  out.close_device = [](ibv_context* context) {
    close(context->async_fd);
    delete context;
    return 0;
  };
  out.query_device = [](ibv_context*, ibv_device_attr* limits) {
    limits->phys_port_cnt = 1;
    limits->max_qp = limits->max_qp_wr = limits->max_cqe = 1 << 20;
    limits->max_sge = 16;
    limits->max_mr_size = ~std::uint64_t{0};
    limits->max_qp_rd_atom = limits->max_qp_init_rd_atom = 16;
    return 0;
  };
  out.query_port = [](ibv_context*, std::uint8_t, ibv_port_attr* port) {
    port->state = IBV_PORT_ACTIVE;
    port->link_layer = IBV_LINK_LAYER_INFINIBAND;  // Needs no address of a network.
    port->lid = 1;
    port->active_mtu = IBV_MTU_4096;
    return 0;
  };
  out.query_gid = [](ibv_context*, std::uint8_t, int, ibv_gid*) { return -1; };
  out.alloc_pd = [](ibv_context* context) { return new ibv_pd{context, 0}; };
  out.dealloc_pd = [](ibv_pd* domain) {
    delete domain;
    return 0;
  };
  out.reg_mr = [](ibv_pd* domain, void* address, std::size_t nbytes, int) {
    return new ibv_mr{domain->context, domain, address, nbytes, 0, 1, 1};
  };
  out.dereg_mr = [](ibv_mr* keys) {
    delete keys;
    return 0;
  };
  out.create_comp_channel = [](ibv_context* context) {
    return new ibv_comp_channel{context, eventfd(0, EFD_CLOEXEC), 0};
  };
  out.destroy_comp_channel = [](ibv_comp_channel* channel) {
    close(channel->fd);
    delete channel;
    return 0;
  };
  out.create_cq = [](ibv_context* context, int entries, void*, ibv_comp_channel* channel,
                     int) -> ibv_cq* {
    auto* const queue = new Queue{};
    queue->context = context;
    queue->channel = channel;
    queue->cqe = entries;
    queue->ring.resize(static_cast<std::size_t>(entries));
    return queue;
  };
  out.resize_cq = [](ibv_cq*, int) { return ENOMEM; };
  out.destroy_cq = [](ibv_cq* queue) {
    delete static_cast<Queue*>(queue);
    return 0;
  };
  out.get_cq_event = [](ibv_comp_channel* channel, ibv_cq**, void**) {
    std::uint64_t count = 0;
    return read(channel->fd, &count, sizeof count) == sizeof count ? 0 : -1;
  };
  out.ack_cq_events = [](ibv_cq*, unsigned) {};
  out.create_qp = [](ibv_pd* domain, ibv_qp_init_attr* wanted) {
    auto* const pair = new ibv_qp{};
    pair->context = domain->context;
    pair->send_cq = wanted->send_cq;
    pair->qp_num = 1;
    return pair;
  };
  out.modify_qp = [](ibv_qp*, ibv_qp_attr*, int) { return 0; };
  out.destroy_qp = [](ibv_qp* pair) {
    delete pair;
    return 0;
  };
  out.get_async_event = [](ibv_context*, ibv_async_event*) { return -1; };
  out.ack_async_event = [](ibv_async_event*) {};
  out.wc_status_str = [](ibv_wc_status) { return "null"; };
  out.event_type_str = [](ibv_event_type) { return "null"; };
  return out;
}

}  // namespace kvzc::bench

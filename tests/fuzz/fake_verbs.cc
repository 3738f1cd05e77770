#include "fuzz/fake_verbs.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "drivers/ibv/ibv.h"

namespace kvzc::fuzz {
namespace {

struct Queue : ibv_cq {
  std::deque<ibv_wc> done;
  bool is_armed = false;
  bool has_event = false;
};

struct Pair : ibv_qp {
  struct Receive {
    std::uint64_t wr_id;
    void* at;
  };
  struct Request {
    std::uint64_t wr_id;
    bool is_signaled;
  };
  std::deque<Receive> receives;
  std::deque<Request> requests;
};

struct Context : ibv_context {
  std::deque<ibv_async_event> events;
};

std::recursive_mutex mutex;  // Guards all of it.
std::array<ibv_device, kDevices> devices;
std::vector<Pair*> pairs;  // Null: gone.
std::vector<Context*> contexts;
std::uint32_t next_number = 1;
int takes = -1;

using Lock = std::lock_guard<std::recursive_mutex>;

void ring(int fd) {
  const std::uint64_t one = 1;
  (void)!write(fd, &one, sizeof one);
}

void complete(ibv_cq* queue, const Pair& pair, std::uint64_t wr_id, ibv_wc_status status,
              ibv_wc_opcode opcode = IBV_WC_SEND, std::uint32_t nbytes = 0) {
  auto* const on = static_cast<Queue*>(queue);
  ibv_wc done{};
  done.wr_id = wr_id;
  done.status = status;
  done.opcode = opcode;
  done.byte_len = nbytes;
  done.qp_num = pair.qp_num;
  on->done.push_back(done);
  if (std::exchange(on->is_armed, false)) {
    on->has_event = true;
    ring(on->channel->fd);
  }
}

void flush(Pair& pair) {
  for (const auto& each : pair.requests) {
    complete(pair.send_cq, pair, each.wr_id, IBV_WC_WR_FLUSH_ERR);
  }
  for (const auto& each : pair.receives) {
    complete(pair.recv_cq, pair, each.wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV);
  }
  pair.requests.clear();
  pair.receives.clear();
}

// --- What verbs.h calls through the context ---

int poll_cq(ibv_cq* queue, int most, ibv_wc* out) {
  const Lock lock(mutex);
  auto& done = static_cast<Queue*>(queue)->done;
  int count = 0;
  for (; count < most && !done.empty(); ++count, done.pop_front()) out[count] = done.front();
  return count;
}

int req_notify_cq(ibv_cq* queue, int) {
  const Lock lock(mutex);
  static_cast<Queue*>(queue)->is_armed = true;
  return 0;
}

int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** refused) {
  const Lock lock(mutex);
  auto& pair = *static_cast<Pair*>(qp);
  for (; request != nullptr; request = request->next) {
    if (takes == 0) {
      takes = -1;
      *refused = request;
      return ENOMEM;
    }
    if (takes > 0) --takes;
    pair.requests.push_back({request->wr_id, (request->send_flags & IBV_SEND_SIGNALED) != 0});
  }
  if (pair.state == IBV_QPS_ERR) flush(pair);
  return 0;
}

int post_recv(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr**) {
  const Lock lock(mutex);
  auto& pair = *static_cast<Pair*>(qp);
  for (; request != nullptr; request = request->next) {
    pair.receives.push_back({request->wr_id, reinterpret_cast<void*>(request->sg_list[0].addr)});
  }
  if (pair.state == IBV_QPS_ERR) flush(pair);
  return 0;
}

// --- The table ---

ibv_device** get_device_list(int* count) {
  auto** const list = new ibv_device*[kDevices + 1]();
  for (std::size_t i = 0; i < kDevices; ++i) {
    std::snprintf(devices[i].name, sizeof devices[i].name, "fuzz%zu", i);
    list[i] = &devices[i];
  }
  *count = kDevices;
  return list;
}

ibv_context* open_device(ibv_device* device) {
  const Lock lock(mutex);
  auto* const out = new Context{};
  out->device = device;
  out->ops.poll_cq = poll_cq;
  out->ops.req_notify_cq = req_notify_cq;
  out->ops.post_send = post_send;
  out->ops.post_recv = post_recv;
  out->async_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  contexts.push_back(out);
  return out;
}

int close_device(ibv_context* context) {
  const Lock lock(mutex);
  std::erase(contexts, context);
  close(context->async_fd);
  delete static_cast<Context*>(context);
  return 0;
}

int query_device(ibv_context*, ibv_device_attr* out) {
  *out = {};
  out->phys_port_cnt = 1;
  out->max_qp = 1 << 16;
  out->max_qp_wr = 1 << 12;
  out->max_sge = 4;
  out->max_cqe = 1 << 20;
  out->max_mr_size = 1u << 30;
  out->max_qp_rd_atom = 16;
  out->max_qp_init_rd_atom = 16;
  return 0;
}

int query_port(ibv_context*, std::uint8_t, ibv_port_attr* out) {
  *out = {};
  out->state = IBV_PORT_ACTIVE;
  out->active_mtu = IBV_MTU_1024;
  out->gid_tbl_len = 1;
  out->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

ssize_t query_gid_table(ibv_context*, ibv_gid_entry* out, std::size_t, std::uint32_t, std::size_t) {
  constexpr std::array<std::uint8_t, 16> kAddress{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1};
  out[0] = {};
  out[0].port_num = 1;
  out[0].gid_type = IBV_GID_TYPE_ROCE_V2;
  std::memcpy(out[0].gid.raw, kAddress.data(), kAddress.size());
  return 1;
}

ibv_pd* alloc_pd(ibv_context* context) {
  auto* const out = new ibv_pd{};
  out->context = context;
  return out;
}

ibv_mr* reg_mr(ibv_pd* domain, void* address, std::size_t nbytes, int) {
  const Lock lock(mutex);
  auto* const out = new ibv_mr{};
  out->context = domain->context;
  out->pd = domain;
  out->addr = address;
  out->length = nbytes;
  out->lkey = out->rkey = next_number++;
  return out;
}

ibv_comp_channel* create_comp_channel(ibv_context* context) {
  auto* const out = new ibv_comp_channel{};
  out->context = context;
  out->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return out;
}

ibv_cq* create_cq(ibv_context* context, int entries, void*, ibv_comp_channel* channel, int) {
  auto* const out = new Queue{};
  out->context = context;
  out->channel = channel;
  out->cqe = entries;
  // An event is of one queue: there is one per channel.
  channel->refcnt = 0;
  return out;
}

int get_cq_event(ibv_comp_channel* channel, ibv_cq**, void**) {
  std::uint64_t count = 0;
  return read(channel->fd, &count, sizeof count) > 0 ? 0 : -1;
}

ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  const Lock lock(mutex);
  auto* const out = new Pair{};
  out->context = domain->context;
  out->pd = domain;
  out->send_cq = wanted->send_cq;
  out->recv_cq = wanted->recv_cq;
  out->qp_num = next_number++;
  out->state = IBV_QPS_RESET;
  pairs.push_back(out);
  return out;
}

int modify_qp(ibv_qp* qp, ibv_qp_attr* to, int mask) {
  const Lock lock(mutex);
  if ((mask & IBV_QP_STATE) == 0) return EINVAL;
  qp->state = to->qp_state;
  if (qp->state == IBV_QPS_ERR) flush(*static_cast<Pair*>(qp));
  return 0;
}

int destroy_qp(ibv_qp* qp) {
  const Lock lock(mutex);
  std::replace(pairs.begin(), pairs.end(), static_cast<Pair*>(qp), static_cast<Pair*>(nullptr));
  delete static_cast<Pair*>(qp);
  return 0;
}

int get_async_event(ibv_context* context, ibv_async_event* out) {
  const Lock lock(mutex);
  auto& events = static_cast<Context*>(context)->events;
  std::uint64_t count = 0;
  (void)!read(context->async_fd, &count, sizeof count);
  if (events.empty()) return -1;
  *out = events.front();
  events.pop_front();
  return 0;
}

template <typename T>
int drop(T* made) {
  delete made;
  return 0;
}

ibv::Verbs table() {
  ibv::Verbs out{};
  out.get_device_list = get_device_list;
  out.free_device_list = [](ibv_device** list) { delete[] list; };
  out.get_device_name = [](ibv_device* device) -> const char* { return device->name; };
  out.get_device_guid = [](ibv_device*) -> decltype(ibv_get_device_guid(nullptr)) { return 0; };
  out.open_device = open_device;
  out.close_device = close_device;
  out.query_device = query_device;
  out.query_port = query_port;
  out.query_gid_table = query_gid_table;
  out.alloc_pd = alloc_pd;
  out.dealloc_pd = drop<ibv_pd>;
  out.reg_mr = reg_mr;
  out.dereg_mr = drop<ibv_mr>;
  out.create_comp_channel = create_comp_channel;
  out.destroy_comp_channel = [](ibv_comp_channel* channel) {
    close(channel->fd);
    return drop(channel);
  };
  out.create_cq = create_cq;
  out.resize_cq = [](ibv_cq* queue, int entries) {
    queue->cqe = entries;
    return 0;
  };
  out.destroy_cq = [](ibv_cq* queue) { return drop(static_cast<Queue*>(queue)); };
  out.get_cq_event = get_cq_event;
  out.ack_cq_events = [](ibv_cq*, unsigned) {};
  out.create_qp = create_qp;
  out.modify_qp = modify_qp;
  out.destroy_qp = destroy_qp;
  out.get_async_event = get_async_event;
  out.ack_async_event = [](ibv_async_event*) {};
  out.wc_status_str = [](ibv_wc_status) { return "as the fuzzer says"; };
  out.event_type_str = [](ibv_event_type) { return "as the fuzzer says"; };
  out.fork_init = [] { return 0; };
  return out;
}

Pair* find(std::size_t pair) { return pair < pairs.size() ? pairs[pair] : nullptr; }

}  // namespace

void forget_pairs() {
  const Lock lock(mutex);
  pairs.clear();
  takes = -1;
}

void deliver(std::size_t pair, std::span<const std::byte> message) {
  const Lock lock(mutex);
  Pair* const to = find(pair);
  if (to == nullptr || to->receives.empty() || to->state != IBV_QPS_RTS) return;
  const Pair::Receive into = to->receives.front();
  to->receives.pop_front();
  if (!message.empty()) std::memcpy(into.at, message.data(), message.size());
  complete(to->recv_cq, *to, into.wr_id, IBV_WC_SUCCESS, IBV_WC_RECV,
           static_cast<std::uint32_t>(message.size()));
}

void give_back(std::size_t pair, std::size_t count, bool is_ok) {
  const Lock lock(mutex);
  Pair* const from = find(pair);
  if (from == nullptr) return;
  for (; count > 0 && !from->requests.empty(); --count) {
    const Pair::Request done = from->requests.front();
    from->requests.pop_front();
    if (!is_ok) {
      complete(from->send_cq, *from, done.wr_id, IBV_WC_RETRY_EXC_ERR);
      from->state = IBV_QPS_ERR;
      return flush(*from);
    }
    if (done.is_signaled) complete(from->send_cq, *from, done.wr_id, IBV_WC_SUCCESS);
  }
}

void take_port_down(std::size_t device) {
  const Lock lock(mutex);
  for (Context* context : contexts) {
    if (context->device != &devices[device]) continue;
    ibv_async_event event{};
    event.event_type = IBV_EVENT_PORT_ERR;
    context->events.push_back(event);
    ring(context->async_fd);
  }
}

void refuse_after(int requests) {
  const Lock lock(mutex);
  takes = requests;
}

// What the linker gives for kvzc::ibv::load(): the option --wrap in CMakeLists.txt.
Result<const ibv::Verbs*> load_fake() __asm__("__wrap__ZN4kvzc3ibv4loadEv");
Result<const ibv::Verbs*> load_fake() {
  static const ibv::Verbs verbs = table();
  return &verbs;
}

}  // namespace kvzc::fuzz

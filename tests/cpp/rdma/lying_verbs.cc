#include "rdma/lying_verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "drivers/ibv/ibv.h"

namespace kvzc::lies {
namespace {

// One opened device. Its descriptor for events is another that also tells of ours.
struct Opened {
  std::string name;
  Device* lie;
  int real_async_fd;
  int own_async_fd;
  int wake;
  std::deque<ibv_event_type> raised;
};

const ibv::Verbs* real = nullptr;
// The entries of the provider: one for all its devices.
ibv_context_ops real_ops;

std::mutex mutex;  // Guards these.
std::map<std::string, std::unique_ptr<Device>> devices;
std::map<ibv_context*, Opened> opened;
std::vector<Modified> modified;
std::atomic<bool> is_connecting_nothing{false};

thread_local std::string opener;

Device& of(ibv_context* context) {
  std::lock_guard lock(mutex);
  return *opened.at(context).lie;
}

// --- What it says of itself ---

int query_device(ibv_context* context, ibv_device_attr* out) {
  const int error = real->query_device(context, out);
  const Device& lie = of(context);
  if (lie.max_mr_size != 0) out->max_mr_size = lie.max_mr_size;
  if (lie.max_sge != 0) out->max_sge = lie.max_sge;
  if (lie.max_cqe != 0) out->max_cqe = lie.max_cqe;
  if (lie.max_reads != 0) out->max_qp_rd_atom = out->max_qp_init_rd_atom = lie.max_reads;
  return error;
}

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* out) {
  const int error = real->query_port(context, port, out);
  if (const int mtu = of(context).active_mtu; mtu != 0) {
    out->active_mtu = static_cast<ibv_mtu>(mtu);
  }
  return error;
}

ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* out, std::size_t most,
                        std::uint32_t flags, std::size_t entry_size) {
  const Device& lie = of(context);
  if (!lie.gids) return real->query_gid_table(context, out, most, flags, entry_size);
  const std::size_t count = std::min(most, lie.gids->size());
  std::copy_n(lie.gids->begin(), count, out);
  return static_cast<ssize_t>(count);
}

// --- Memory ---

ibv_mr* reg_mr(ibv_pd* domain, void* address, std::size_t nbytes, int access) {
  Device& lie = of(domain->context);
  if (lie.max_mr_size != 0 && nbytes > lie.max_mr_size) {
    errno = EINVAL;
    return nullptr;
  }
  if (const int error = lie.refuses_memory; error != 0 && lie.takes_memory.fetch_sub(1) <= 0) {
    errno = error;
    return nullptr;
  }
  ibv_mr* const region = real->reg_mr(domain, address, nbytes, access);
  if (region != nullptr) ++lie.held;
  return region;
}

int dereg_mr(ibv_mr* region) {
  Device& lie = of(region->context);
  if (lie.keeps_memory > 0) {
    --lie.keeps_memory;
    return EBUSY;
  }
  const int error = real->dereg_mr(region);
  if (error == 0) --lie.held;
  return error;
}

// --- Queue pairs ---

int modify_qp(ibv_qp* pair, ibv_qp_attr* to, int mask) {
  {
    std::lock_guard lock(mutex);
    modified.push_back({opened.at(pair->context).name, *to});
  }
  if (is_connecting_nothing && (to->qp_state == IBV_QPS_RTR || to->qp_state == IBV_QPS_RTS)) {
    return 0;
  }
  return real->modify_qp(pair, to, mask);
}

void count(Device& lie, const ibv_send_wr* first, const ibv_send_wr* end) {
  for (; first != end; first = first->next) {
    if (first->opcode == IBV_WR_RDMA_WRITE) ++lie.writes;
    if (first->opcode == IBV_WR_RDMA_READ) ++lie.reads;
  }
}

int post_send(ibv_qp* pair, ibv_send_wr* first, ibv_send_wr** refused) {
  Device& lie = of(pair->context);
  if (const int error = lie.refuses_request; error != 0) {
    ibv_send_wr* last_taken = nullptr;
    ibv_send_wr* each = first;
    while (each != nullptr && lie.takes_requests > 0) {
      --lie.takes_requests;
      last_taken = std::exchange(each, each->next);
    }
    if (each != nullptr) {
      lie.refuses_request = 0;
      if (last_taken != nullptr) {
        last_taken->next = nullptr;
        const int real_error = real_ops.post_send(pair, first, refused);
        last_taken->next = each;
        if (real_error != 0) return real_error;
        count(lie, first, each);
        // They are carried out before the caller hears that the others are not.
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      *refused = each;
      return error;
    }
  }
  const int error = real_ops.post_send(pair, first, refused);
  count(lie, first, error == 0 ? nullptr : *refused);
  return error;
}

int poll_cq(ibv_cq* queue, int most, ibv_wc* out) {
  Device& lie = of(queue->context);
  if (lie.is_dead) return 0;
  const int count = real_ops.poll_cq(queue, most, out);
  for (int i = 0; i < count; ++i) {
    if (lie.disowns_messages == 0 || out[i].status != IBV_WC_SUCCESS || out[i].opcode != IBV_WC_SEND) {
      continue;
    }
    --lie.disowns_messages;
    out[i].status = IBV_WC_RETRY_EXC_ERR;
  }
  return count;
}

// --- Open devices, and what befalls them ---

// As long as it lives libibverbs sees the descriptor that it made. A thread that begins to sleep just
// then does not hear of what is raised: it does so again after the next completion.
class RealEvents {
 public:
  explicit RealEvents(ibv_context* context) : context_(context), lock_(mutex) {
    context_->async_fd = opened.at(context_).real_async_fd;
  }
  ~RealEvents() { context_->async_fd = opened.at(context_).own_async_fd; }

 private:
  ibv_context* const context_;
  std::lock_guard<std::mutex> lock_;
};

ibv_cq* create_cq(ibv_context* context, int entries, void* name, ibv_comp_channel* channel,
                  int vector) {
  const RealEvents real_events(context);
  return real->create_cq(context, entries, name, channel, vector);
}

ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  const RealEvents real_events(domain->context);
  ibv_qp* const pair = real->create_qp(domain, wanted);
  const auto most = static_cast<std::uint32_t>(opened.at(domain->context).lie->max_sge);
  if (most != 0) wanted->cap.max_send_sge = std::min(wanted->cap.max_send_sge, most);
  return pair;
}

void watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

ibv_context* open_device(ibv_device* which) {
  ibv_context* const context = real->open_device(which);
  if (context == nullptr) return nullptr;
  const std::string name = opener + ":" + context->device->name;
  Device* const lie = &lies::device(name);
  std::lock_guard lock(mutex);
  Opened& out = opened[context];
  out = {name, lie, context->async_fd, epoll_create1(EPOLL_CLOEXEC),
         eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), {}};
  fcntl(out.real_async_fd, F_SETFL, fcntl(out.real_async_fd, F_GETFL) | O_NONBLOCK);
  watch(out.own_async_fd, out.real_async_fd);
  watch(out.own_async_fd, out.wake);
  context->async_fd = out.own_async_fd;
  real_ops = context->ops;
  context->ops.post_send = post_send;
  context->ops.poll_cq = poll_cq;
  return context;
}

int close_device(ibv_context* context) {
  {
    std::lock_guard lock(mutex);
    auto node = opened.extract(context);
    context->async_fd = node.mapped().real_async_fd;
    close(node.mapped().own_async_fd);
    close(node.mapped().wake);
  }
  return real->close_device(context);
}

int get_async_event(ibv_context* context, ibv_async_event* out) {
  const RealEvents real_events(context);
  Opened& at = opened.at(context);
  if (!at.raised.empty()) {
    *out = {};
    out->event_type = at.raised.front();
    at.raised.pop_front();
    return 0;
  }
  std::uint64_t none = 0;
  [[maybe_unused]] const ssize_t got = read(at.wake, &none, sizeof none);
  return real->get_async_event(context, out);
}

}  // namespace

Device& device(const std::string& of) {
  std::lock_guard lock(mutex);
  std::unique_ptr<Device>& found = devices[of];
  if (!found) found = std::make_unique<Device>();
  return *found;
}

void open_as(const std::string& engine) { opener = engine; }

std::int64_t all_held() {
  std::lock_guard lock(mutex);
  std::int64_t sum = 0;
  for (const auto& [name, each] : devices) sum += each->held;
  return sum;
}

void stop_lying() {
  std::lock_guard lock(mutex);
  modified.clear();
  is_connecting_nothing = false;
  for (auto& [name, each] : devices) {
    const std::int64_t held = each->held;
    std::destroy_at(each.get());
    std::construct_at(each.get())->held = held;
  }
}

std::vector<Modified> modified_to(ibv_qp_state state) {
  std::lock_guard lock(mutex);
  std::vector<Modified> out;
  std::copy_if(modified.begin(), modified.end(), std::back_inserter(out),
               [state](const Modified& each) { return each.attributes.qp_state == state; });
  return out;
}

void connect_nothing() { is_connecting_nothing = true; }

int raise(const std::string& device, ibv_event_type event) {
  std::lock_guard lock(mutex);
  int count = 0;
  for (auto& [context, at] : opened) {
    if (at.name != device) continue;
    at.raised.push_back(event);
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(at.wake, &one, sizeof one);
    ++count;
  }
  return count;
}

// What the linker gives for kvzc::ibv::load(): the option --wrap in CMakeLists.txt.
Result<const ibv::Verbs*> load_real() __asm__("__real__ZN4kvzc3ibv4loadEv");
Result<const ibv::Verbs*> load_lying() __asm__("__wrap__ZN4kvzc3ibv4loadEv");

Result<const ibv::Verbs*> load_lying() {
  static const Result<const ibv::Verbs*> loaded = load_real();
  if (!loaded.is_ok()) return loaded.status();
  static const ibv::Verbs lying = [] {
    real = *loaded;
    ibv::Verbs out = *real;
    out.open_device = open_device;
    out.close_device = close_device;
    out.query_device = query_device;
    out.query_port = query_port;
    out.query_gid_table = query_gid_table;
    out.reg_mr = reg_mr;
    out.dereg_mr = dereg_mr;
    out.create_cq = create_cq;
    out.create_qp = create_qp;
    out.modify_qp = modify_qp;
    out.get_async_event = get_async_event;
    return out;
  }();
  return &lying;
}

}  // namespace kvzc::lies

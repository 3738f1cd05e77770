#include "cpp/rdma/verbs_watch.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "cpp/rdma/null_device.h"
#include "drivers/ibv/ibv.h"

namespace kvzc::bench {
namespace {

std::mutex contexts_mutex;
std::vector<ibv_context*> contexts;  // Guarded by contexts_mutex.
const ibv::Verbs* real_verbs = nullptr;
bool is_null = false;

// The entries of the provider: one for all its devices.
ibv_context_ops real_ops;

std::atomic<std::uint64_t> posts, requests, signalled, post_ns, polls, completions, arms;

void add(std::atomic<std::uint64_t>& count, std::uint64_t by) {
  count.fetch_add(by, std::memory_order_relaxed);
}

int post_send(ibv_qp* pair, ibv_send_wr* first, ibv_send_wr** refused) {
  for (const ibv_send_wr* each = first; each != nullptr; each = each->next) {
    add(requests, 1);
    if ((each->send_flags & IBV_SEND_SIGNALED) != 0) add(signalled, 1);
  }
  const std::int64_t start = now_ns();
  const int error = real_ops.post_send(pair, first, refused);
  add(post_ns, static_cast<std::uint64_t>(now_ns() - start));
  add(posts, 1);
  return error;
}

int poll_cq(ibv_cq* queue, int most, ibv_wc* out) {
  const int count = real_ops.poll_cq(queue, most, out);
  add(polls, 1);
  if (count > 0) add(completions, static_cast<std::uint64_t>(count));
  return count;
}

int req_notify_cq(ibv_cq* queue, int solicited_only) {
  add(arms, 1);
  return real_ops.req_notify_cq(queue, solicited_only);
}

ibv_context* open_device(ibv_device* device) {
  ibv_context* const context = real_verbs->open_device(device);
  if (context != nullptr) {
    std::lock_guard lock(contexts_mutex);
    real_ops = context->ops;
    contexts.push_back(context);
  }
  return context;
}

int close_device(ibv_context* context) {
  {
    std::lock_guard lock(contexts_mutex);
    std::erase(contexts, context);
  }
  return real_verbs->close_device(context);
}

void exchange(const ibv_context_ops& ops) {
  std::lock_guard lock(contexts_mutex);
  for (ibv_context* context : contexts) {
    context->ops.post_send = ops.post_send;
    context->ops.poll_cq = ops.poll_cq;
    context->ops.req_notify_cq = ops.req_notify_cq;
  }
}

}  // namespace

Result<const ibv::Verbs*> load() __asm__("__real__ZN4kvzc3ibv4loadEv");
Result<const ibv::Verbs*> load_watched() __asm__("__wrap__ZN4kvzc3ibv4loadEv");

Result<const ibv::Verbs*> load_watched() {
  static const ibv::Verbs null = null_verbs();
  static const Result<const ibv::Verbs*> loaded =
      is_null ? Result<const ibv::Verbs*>(&null) : load();
  if (!loaded.is_ok()) return loaded.status();
  static const ibv::Verbs watched = [] {
    real_verbs = *loaded;
    ibv::Verbs out = *real_verbs;
    out.open_device = open_device;
    out.close_device = close_device;
    return out;
  }();
  return &watched;
}

void use_null_device() { is_null = true; }

VerbsWatch::VerbsWatch() {
  for (auto* count : {&posts, &requests, &signalled, &post_ns, &polls, &completions, &arms}) {
    count->store(0);
  }
  ibv_context_ops ops{};
  ops.post_send = post_send;
  ops.poll_cq = poll_cq;
  ops.req_notify_cq = req_notify_cq;
  exchange(ops);
}

VerbsWatch::~VerbsWatch() { exchange(real_ops); }

VerbsCounts VerbsWatch::counts() const {
  return {posts, requests, signalled, post_ns, polls, completions, arms};
}

}  // namespace kvzc::bench

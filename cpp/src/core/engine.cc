// The public classes of engine.h: thin, since EngineCore does the work.

#include "kvzc/engine.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/futex.h"
#include "core/engine_core.h"

namespace kvzc {
namespace {

// After helping, the last chunks of the other threads take about this long.
constexpr std::int64_t kSpinNs = 30'000;
// A sleeping thread looks this often whether its peer is lost.
constexpr std::int64_t kLookNs = 100'000'000;

}  // namespace

// --- Transfer ---

Transfer::Transfer(std::shared_ptr<EngineCore> core, OperationSlot* slot)
    : core_(std::move(core)), slot_(slot) {}

void Transfer::retain() const { slot_->retain(); }
void Transfer::release() const { core_->release(*slot_); }

bool Transfer::has_ended() const { return slot_ == nullptr || slot_->state.has_ended(); }
const Status& Transfer::status() const {
  return slot_ == nullptr ? ended_.status : slot_->state.status();
}
std::uint64_t Transfer::nbytes() const { return slot_ == nullptr ? ended_.nbytes : slot_->nbytes; }
std::uint64_t Transfer::run_count() const { return slot_ == nullptr ? 1 : slot_->run_count; }
std::string_view Transfer::transport() const {
  const char* const name =
      slot_ == nullptr ? ended_.transport : slot_->transport.load(std::memory_order_relaxed);
  return name == nullptr ? std::string_view() : std::string_view(name);
}
std::int64_t Transfer::submitted_ns() const {
  return slot_ == nullptr ? ended_.submitted_ns : slot_->state.submitted_ns();
}
std::int64_t Transfer::done_ns() const {
  return slot_ == nullptr ? ended_.done_ns : slot_->state.done_ns();
}

void Transfer::watch(TransferState::Watch& watch) const {
  if (slot_ == nullptr) return watch.on_end(watch);
  slot_->state.watch(watch);
}

void Transfer::unwatch(TransferState::Watch& watch) const {
  if (slot_ != nullptr) slot_->state.unwatch(watch);
}

Status Transfer::usable_here() const {
  return slot_ == nullptr ? Status::ok() : core_->usable_here();
}

Status Transfer::peer_status() const {
  if (slot_ == nullptr) return Status::ok();
  const Channel* channel = slot_->channel.load(std::memory_order_acquire);
  return channel == nullptr ? Status::ok() : channel->lost();
}

Status Transfer::cancel(std::int64_t deadline_ns) const {
  return slot_ == nullptr ? Status::ok() : core_->cancel(*slot_, deadline_ns);
}

namespace {

// Sleeps on several transfers at once, and is off all their lists when it goes.
class Watcher {
 public:
  explicit Watcher(std::span<const Transfer> transfers)
      : transfers_(transfers), watches_(transfers.size(), WakerWatch(waker_)) {
    for (std::size_t i = 0; i < transfers_.size(); ++i) {
      transfers_[i].watch(watches_[i]);
      transfers_[i].will_sleep();
    }
  }
  ~Watcher() {
    for (std::size_t i = 0; i < transfers_.size(); ++i) transfers_[i].unwatch(watches_[i]);
  }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // Gives whether one has ended by the deadline.
  bool sleep(std::int64_t deadline_ns) {
    while (!waker_.has_fired()) {
      const std::int64_t left = deadline_ns - now_ns();
      if (left <= 0) return false;
      waker_.sleep(left);
    }
    return true;
  }

 private:
  std::span<const Transfer> transfers_;
  Waker waker_;  // Before those that fire it.
  std::vector<WakerWatch> watches_;
};

bool spin_until_ended(const Transfer& transfer, std::int64_t start_ns, std::int64_t deadline_ns) {
  const std::int64_t until = std::min(deadline_ns, start_ns + kSpinNs);
  while (!transfer.has_ended()) {
    if (now_ns() >= until) return false;
    cpu_relax();
  }
  return true;
}

Status still_running() {
  return Status(Code::kTimedOut, "the transfer has not ended in time; it is still running");
}

// When its peer is lost a transfer ends as soon as it is quiet, and that is not waited for: whoever
// waits hears of the loss.
Status sleep_until_one_ended(std::span<const Transfer> transfers, std::int64_t deadline_ns) {
  Watcher watcher(transfers);
  for (;;) {
    if (watcher.sleep(std::min(deadline_ns, now_ns() + kLookNs))) return Status::ok();
    for (const Transfer& transfer : transfers) {
      if (transfer.has_ended()) return Status::ok();
      if (Status lost = transfer.peer_status(); !lost.is_ok()) return lost;
    }
    if (now_ns() >= deadline_ns) return still_running();
  }
}

Status wait_for_one(const Transfer& transfer, std::int64_t deadline_ns) {
  if (transfer.has_ended()) return Status::ok();
  transfer.help(deadline_ns);
  if (transfer.has_ended()) return Status::ok();
  const std::int64_t start = now_ns();
  Status slept;
  if (!spin_until_ended(transfer, start, deadline_ns)) {
    slept = sleep_until_one_ended({&transfer, 1}, deadline_ns);
  }
  transfer.count_wait(now_ns() - start);
  return slept;
}

}  // namespace

Status Transfer::wait(std::int64_t deadline_ns) const {
  if (slot_ == nullptr) return Status::ok();
  if (core_->is_forked_child()) return core_->usable_here();
  return wait_for_one(*this, deadline_ns);
}

Status wait_for(std::span<const Transfer> transfers, WaitFor what, std::int64_t deadline_ns) {
  // In a forked child a transfer never ends, and its copying is the parent's business.
  for (const Transfer& transfer : transfers) {
    if (Status here = transfer.usable_here(); !here.is_ok()) return here;
  }
  const auto has_ended = [](const Transfer& transfer) { return transfer.has_ended(); };
  if (what == WaitFor::kFirst) {
    if (transfers.empty() || std::any_of(transfers.begin(), transfers.end(), has_ended)) {
      return Status::ok();
    }
    // No helping: it might be with the one that ends last.
    const std::int64_t start = now_ns();
    Status slept = sleep_until_one_ended(transfers, deadline_ns);
    transfers[0].count_wait(now_ns() - start);
    return slept;
  }
  for (const Transfer& transfer : transfers) {
    if (Status waited = wait_for_one(transfer, deadline_ns); !waited.is_ok()) return waited;
  }
  return Status::ok();
}

void Transfer::count_wait(std::int64_t ns) const {
  if (slot_ != nullptr) core_->waited(ns);
}

void Transfer::will_sleep() const {
  if (slot_ == nullptr) return;
  Channel* channel = slot_->channel.load(std::memory_order_acquire);
  if (channel != nullptr && !has_ended()) channel->will_sleep(*slot_);
}

void Transfer::help(std::int64_t deadline_ns) const {
  if (slot_ == nullptr || core_->is_forked_child()) return;
  Channel* channel = slot_->channel.load(std::memory_order_acquire);
  if (channel != nullptr) channel->help(*slot_, deadline_ns);
}

// --- RunList ---

RunList::RunList(OperationSlot& slot) : slot_(slot), runs_(slot.runs) {}

void RunList::begin(const LocalStorage& local, std::uint32_t remote_storage) {
  slot_.segments.push_back(
      {static_cast<std::uint32_t>(runs_.size()), 0, nullptr, local.piece()});
  slot_.segment_storage.push_back(remote_storage);
}

Status RunList::reserve(std::uint64_t more) {
  if (more > kMostRuns - std::min<std::uint64_t>(runs_.size(), kMostRuns)) {
    return Status(Code::kLimitExceeded, "the transfer falls into more than " +
                                            std::to_string(kMostRuns) +
                                            " separate pieces; move less at once");
  }
  runs_.reserve(runs_.size() + static_cast<std::size_t>(more));
  return Status::ok();
}

// --- Grant ---

Grant::Grant(std::shared_ptr<EngineCore> core, std::shared_ptr<const GrantRecord> record, View view)
    : core_(std::move(core)), record_(std::move(record)), view_(std::move(view)) {}

Result<HandleInfo> Grant::handle() const { return core_->describe(*record_, view_); }
Access Grant::access() const { return record_->access; }
bool Grant::is_revoked() const { return core_->is_revoked(*record_); }

Status Grant::revoke(std::int64_t deadline_ns, Force force) const {
  return core_->revoke_grant(record_, deadline_ns, force);
}

// --- Region ---

Region::Region(std::shared_ptr<EngineCore> core, std::shared_ptr<RegionRecord> record)
    : core_(std::move(core)), record_(std::move(record)) {}

Result<LocalView> Region::view() const {
  const MutexLock lock(record_->mutex);
  if (!record_->memory) return Status(Code::kClosed, "the region is closed");
  return LocalView{record_->memory, record_->layout};
}

const View& Region::layout() const { return record_->layout; }

bool Region::is_open() const {
  const MutexLock lock(record_->mutex);
  return record_->memory != nullptr;
}

Result<HandleInfo> Region::handle() const {
  Result<std::shared_ptr<const GrantRecord>> grant = core_->whole_grant(*record_);
  if (!grant.is_ok()) return grant.status();
  return core_->describe(**grant, record_->layout);
}

Status Region::revoke(std::int64_t deadline_ns, Force force) {
  return core_->revoke_region(record_, deadline_ns, force);
}

std::string Region::path() const {
  const Result<LocalView> whole = view();
  if (!whole.is_ok()) return "closed";
  const bool is_shared =
      std::all_of(whole->memory->storages.begin(), whole->memory->storages.end(),
                  [](const auto& storage) { return storage->allocation != nullptr; });
  return is_shared ? "mapped: peers on this host copy straight into and out of it"
                   : "private: the kernel copies for peers on this host (process_vm_writev), at "
                     "about a third of the speed; memory from kvzc.empty(shape, dtype), or moved "
                     "by kvzc.share(tensor), would be mapped";
}

Status Region::close(std::int64_t deadline_ns) { return core_->close_region(record_, deadline_ns); }

void Region::close_later() { core_->close_region_later(record_); }

// --- Engine ---

Result<std::shared_ptr<Engine>> Engine::create(EngineOptions options) {
  if (!options.allocator) options.allocator = std::make_shared<SharedAllocator>();
  if (options.max_grants == 0 || options.max_grants >= (1u << 24)) {
    return Status(Code::kInvalidArgument, "max_grants is " + std::to_string(options.max_grants) +
                                              "; 1 to 16777215 are possible");
  }
  if (options.max_transfers == 0) {
    return Status(Code::kInvalidArgument, "max_transfers is 0; at least 1 is needed");
  }
  auto core = std::make_shared<EngineCore>(std::move(options));
  Status started = core->start();
  if (!started.is_ok()) return started;
  return std::shared_ptr<Engine>(new Engine(std::move(core)));
}

Engine::~Engine() {
  if (core_->usable().code() == Code::kForkedEngine) {
    // Its threads and locks are the parent's. Never destroyed here, so that nothing waits for them.
    new std::shared_ptr<EngineCore>(std::move(core_));
    return;
  }
  (void)core_->close(now_ns() + 1'000'000'000);
}

const std::string& Engine::name() const { return core_->engine_name(); }
const Incarnation& Engine::incarnation() const { return core_->incarnation(); }
const std::vector<std::string>& Engine::addresses() const { return core_->addresses(); }
SharedAllocator& Engine::allocator() const { return *core_->options().allocator; }
const EngineOptions& Engine::options() const { return core_->options(); }
Status Engine::usable() const { return core_->usable(); }

Result<Region> Engine::register_memory(std::span<const TensorSpec> tensors) {
  return core_->register_memory(tensors);
}

Result<LocalView> Engine::find_or_borrow(const TensorSpec& tensor) {
  return core_->find_or_borrow(tensor);
}

Result<Grant> Engine::grant(const LocalView& view, Access access) {
  return core_->grant(view, access);
}

Result<Catalog> Engine::catalog() { return core_->catalog(); }

Result<Transfer> Engine::try_put(std::span<const TransferItem> items,
                                 const TransferOptions& options) {
  return core_->try_submit(Direction::kPut, items, options);
}

Result<Transfer> Engine::try_get(std::span<const TransferItem> items,
                                 const TransferOptions& options) {
  return core_->try_submit(Direction::kGet, items, options);
}

Result<Transfer> Engine::try_run(Direction direction, const RunCutter& cutter,
                                 const TransferOptions& options) {
  return core_->try_run(direction, cutter, options);
}

Result<Transfer> Engine::try_notify(const RemoteView& target, const TransferOptions& options) {
  return core_->try_notify(target, options);
}

Result<Transfer> Engine::try_notify(const PeerInfo& target, const TransferOptions& options) {
  return core_->try_notify(target, options);
}

void Engine::wait_for_room(const RemoteView& target, const TransferOptions& options,
                           std::int64_t deadline_ns) {
  core_->wait_for_room(target, options, deadline_ns);
}

void Engine::wait_for_room(const PeerInfo& target, const TransferOptions& options,
                           std::int64_t deadline_ns) {
  core_->wait_for_room(target, options, deadline_ns);
}

namespace {

Result<Transfer> submit(EngineCore& core, Direction direction, std::span<const TransferItem> items,
                        const TransferOptions& options, std::int64_t deadline_ns) {
  for (;;) {
    Result<Transfer> transfer = core.try_submit(direction, items, options);
    if (transfer.is_ok() || transfer.status().code() != Code::kWouldBlock) return transfer;
    if (now_ns() >= std::min(deadline_ns, options.deadline_ns)) {
      return Status(Code::kTimedOut, "the transfer was not accepted in time, nothing was posted: " +
                                         std::string(transfer.status().text()));
    }
    core.wait_for_room(*items[0].remote, options, std::min(deadline_ns, options.deadline_ns));
  }
}

}  // namespace

Result<Transfer> Engine::put(std::span<const TransferItem> items, const TransferOptions& options,
                             std::int64_t deadline_ns) {
  return submit(*core_, Direction::kPut, items, options, deadline_ns);
}

Result<Transfer> Engine::get(std::span<const TransferItem> items, const TransferOptions& options,
                             std::int64_t deadline_ns) {
  return submit(*core_, Direction::kGet, items, options, deadline_ns);
}

Result<Transfer> Engine::connect(const RemoteView& target) { return core_->connect(target); }

Result<std::shared_ptr<const PeerInfo>> Engine::peer_of(const RemoteView& target) {
  const auto resolved = core_->binding_for(target).resolved();
  if (!resolved) return Status(Code::kPeerLost, "the handle's engine is not connected");
  return resolved->endpoint->info();
}

Result<std::string> Engine::explain(const RemoteView& target) { return core_->explain(target); }

Status Engine::peer_status(const PeerInfo& peer) const { return core_->peer_status(peer); }

Result<std::vector<Arrival>> Engine::wait_arrivals(std::string_view tag, std::size_t count,
                                                   const PeerInfo* peer, std::int64_t deadline_ns,
                                                   const std::function<bool()>& go_on) {
  return core_->wait_arrivals(tag, count, peer, deadline_ns, go_on);
}

std::vector<Arrival> Engine::poll_arrivals(std::size_t most) { return core_->poll_arrivals(most); }
void Engine::forget_arrivals(std::string_view tag) { core_->forget_arrivals(tag); }
int Engine::arrivals_fd() { return core_->arrivals_fd(); }
bool Engine::is_traced() const { return core_->is_traced(); }
EngineStats Engine::stats() const { return core_->stats(); }
std::vector<PeerStats> Engine::peer_stats() const { return core_->peer_stats(); }
Status Engine::close(std::int64_t deadline_ns) { return core_->close(deadline_ns); }

}  // namespace kvzc

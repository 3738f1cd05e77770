#include "core/engine_core.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "base/clock.h"
#include "base/futex.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/sha256.h"
#include "base/tcp_socket.h"
#include "base/unix_socket.h"
#include "transport/transport_list.h"

namespace kvzc {
namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;
constexpr std::int64_t kCreditRetryNs = 1'000'000;
constexpr std::int64_t kMostCreditPauseNs = 20'000'000;
// A close that waits looks this often whether it is to hurry.
constexpr std::int64_t kCloseSliceNs = 50'000'000;
constexpr std::int64_t kFirstRetryNs = 1'000'000;
// How long a peer that is cut off is given to finish one bounded copy.
constexpr std::int64_t kCutPatienceNs = 200'000'000;
constexpr std::int64_t kAcceptPauseNs = 100'000'000;
constexpr std::size_t kMostHalfOpen = 128;
constexpr std::size_t kMostLostPeers = 4096;
constexpr std::size_t kMostCountedPeers = 1024;
constexpr std::size_t kMostStorages = 4096;
// A peer on another host that was lost is tried again after this long: where nothing answered, and
// where its host said that nobody listens any more.
constexpr std::int64_t kNetworkPauseNs = kSecondNs;
constexpr std::int64_t kEndedPauseNs = 100'000'000;
constexpr std::size_t kLeastSecretBytes = 16;
constexpr std::size_t kMostAddresses = 8;
// A waiting thread looks at least, and at most, this long before it sleeps: longer where only devices
// wake it, which wake a thread that wakes it.
constexpr std::int64_t kSpinNs = 20'000;
constexpr std::int64_t kMostSpinNs = 200'000;
constexpr std::int64_t kMostDeviceSpinNs = 2'000'000;
// How often a thread that waits for tags is asked whether it still wants to.
constexpr std::int64_t kAskNs = 50'000'000;

// Made when the library is loaded: what is refused for want of memory is abandoned without any.
const Status& never_started = *new Status(Code::kCancelled, "never started");

Status closed() { return Status(Code::kClosed, "the engine is closed; make another one"); }

// A shortage passes; asked again, it may go well.
bool may_change(Code code) {
  return code == Code::kTimedOut || code == Code::kLimitExceeded || code == Code::kSystem;
}

// Up to so many bytes a transfer that is done within its call is not always timed.
constexpr std::uint64_t kUntimedBytes = 1024;

// Gives numbers that no two transfers of this process share, from 1 on.
std::uint64_t next_number() {
  constexpr std::uint64_t kBlock = 1 << 20;  // A thread takes so many at once.
  static std::atomic<std::uint64_t> blocks{0};
  thread_local std::uint64_t next = 0;
  if (next % kBlock == 0) next = blocks.fetch_add(1, std::memory_order_relaxed) * kBlock + 1;
  return next++;
}

// Says whether the run's two sides share bytes of one allocation.
bool runs_into_itself(const Run& run, const MemoryPiece& local, const RemoteMemory& remote) {
  const std::optional<std::int64_t> base = remote.offset_of(local);
  if (!base) return false;
  const std::int64_t begin = *base + (run.local - local.data);
  const auto nbytes = static_cast<std::int64_t>(run.nbytes);
  const auto target = static_cast<std::int64_t>(run.remote);
  return begin < target + nbytes && target < begin + nbytes;
}

// Says whether a handle lets bytes move this way.
bool is_granted(Direction direction, const HandleInfo& handle) {
  const Access needed = direction == Direction::kPut ? Access::kPut : Access::kGet;
  return handle.device_kind == 0 && (static_cast<int>(handle.access) & static_cast<int>(needed)) != 0;
}

Status deadline_passed() {
  return Status(Code::kCancelled, "the transfer's deadline passed before it was done");
}

// Better a leak than memory that is used again while a peer, or a thread, still touches it.
void keep_for_ever(std::shared_ptr<void> what) {
  static Mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const MutexLock lock(mutex);
  kept->push_back(std::move(what));
}

Status region_closed() { return Status(Code::kClosed, "the region is closed"); }

}  // namespace

EngineCore::EngineCore(EngineOptions options)
    : options_(std::move(options)),
      transport_host_{doorbell_, fences_, *this, *this, options_.tuning, options_.rdma},
      grants_(fences_),
      storages_(options_.allocator),
      inbox_(static_cast<std::int64_t>(std::min(options_.arrival_ttl_seconds, 3.0e9) * 1e9)),
      arrival_patience_(kSpinNs, kMostSpinNs) {}

EngineCore::~EngineCore() = default;

Status EngineCore::forked() {
  return Status(Code::kForkedEngine,
                "this engine was made before fork() and belongs to the parent process; make "
                "another one here, or start the process with 'spawn'");
}

Status EngineCore::usable() const {
  if (is_usable()) return Status::ok();
  return fork_guard_.is_forked_child() ? forked() : closed();
}

// --- Start and close ---

Status EngineCore::start() {
  Status filled = fill_random(incarnation_);
  if (!filled.is_ok()) return filled;
  if (options_.name.empty()) {
    options_.name = std::to_string(getpid()) + "-" + incarnation_text(incarnation_).substr(0, 8);
  }
  // With the host's mark: a handle that has travelled finds nobody there, whatever runs there.
  address_ = "kvzc/" + std::to_string(getuid()) + "/" + options_.name + "/" + host_token();

  const char* const wished = options_.trace.empty() ? getenv("KVZC_TRACE") : options_.trace.c_str();
  if (wished != nullptr && *wished != '\0') {
    Result<std::unique_ptr<Trace>> trace = Trace::open(wished, options_.name);
    if (!trace.is_ok()) return trace.status();
    trace_ = trace.take();
  }

  Result<Doorbell> doorbell = Doorbell::create();
  if (!doorbell.is_ok()) return doorbell.status();
  doorbell_ = doorbell.take();
  Result<FenceBoard> fences = FenceBoard::create(options_.max_grants);
  if (!fences.is_ok()) return fences.status();
  fences_ = fences.take();

  std::vector<std::string> names = options_.transports;
  if (names.empty()) {
    for (const TransportInfo& info : list_transports()) {
      if (info.is_available) names.emplace_back(info.name);
    }
  }
  for (const std::string& name : names) {
    Result<std::unique_ptr<Transport>> transport = make_transport(name, transport_host_, options_.faults);
    if (transport.is_ok()) {
      transports_.push_back(transport.take());
    } else if (!options_.transports.empty() || (transports_.empty() && name == names.back())) {
      return transport.status();
    }
  }

  if (std::none_of(transports_.begin(), transports_.end(),
                   [](const auto& transport) { return transport->is_local(); })) {
    arrival_patience_.set_most(kMostDeviceSpinNs);
  }

  Result<OwnedFd> listener = listen_at(address_);
  if (!listener.is_ok()) return listener.status();
  listener_ = listener.take();
  sockets_.add(listener_.get());
  if (Status listening = listen_to_hosts(); !listening.is_ok()) return listening;
  Status started = loop_.start();
  if (!started.is_ok()) return started;
  loop_.post([this] {
    watch_listener(listener_, ControlSocket::Kind::kUnix);
    if (host_listener_.is_valid()) watch_listener(host_listener_, ControlSocket::Kind::kTcp);
    loop_.run_at(now_ns() + kSecondNs, [this] { tick(); });
  });
  return Status::ok();
}

Status EngineCore::listen_to_hosts() {
  const auto refused = [](std::string why) { return Status(Code::kInvalidArgument, std::move(why)); };
  if (!options_.secret.empty() && options_.secret.size() < kLeastSecretBytes) {
    return refused("the secret is " + std::to_string(options_.secret.size()) +
                   " bytes long; at least 16 that nobody can guess, for example those of "
                   "python3 -c 'import secrets; print(secrets.token_hex(16))'");
  }
  if (options_.peer_timeout_seconds < 2 || options_.peer_timeout_seconds > 3600) {
    return refused("the peer timeout is " + std::to_string(options_.peer_timeout_seconds) +
                   " s; it must be whole seconds, 2 to 3600");
  }
  if (options_.listen.empty()) {
    if (options_.advertise.empty()) return Status::ok();
    return refused("advertise= says where others reach what listen= opens; give both");
  }
  if (options_.secret.empty()) {
    return refused("an engine that listens at " + options_.listen +
                   " needs a secret, which its peers know too: Engine(secret=...)");
  }
  Result<std::vector<std::string>> own = look_up(options_.listen);
  if (!own.is_ok()) return own.status();
  Result<OwnedFd> listener = listen_tcp(own->front());
  if (!listener.is_ok()) return listener.status();
  host_listener_ = listener.take();
  sockets_.add(host_listener_.get());
  const std::string bound = local_address(host_listener_.get());
  if (options_.advertise.empty()) {
    addresses_ = reachable_addresses(bound);
  } else {
    std::string outer = options_.advertise;
    // Port 0: the one that was found.
    if (outer.ends_with(":0")) outer = outer.substr(0, outer.size() - 2) + bound.substr(bound.rfind(':'));
    Result<std::vector<std::string>> named = look_up(outer);
    if (!named.is_ok()) return named.status();
    addresses_ = named.take();
    for (const std::string& each : addresses_) {
      if (!each.starts_with("0.0.0.0:") && !each.starts_with("[::]:")) continue;
      return refused("advertise= names one address that others can reach, and " + each +
                     " is none; omit it for all that this host has");
    }
  }
  if (addresses_.size() > kMostAddresses) addresses_.resize(kMostAddresses);
  if (!addresses_.empty()) return Status::ok();
  return refused("this host has no address but loopback that handles could name for " + bound +
                 "; listen at a certain address, or name one in advertise=");
}

bool EngineCore::end_waiting(const Status& why) {
  std::vector<std::shared_ptr<Binding>> bindings;
  {
    const MutexLock lock(mutex_);
    for (auto& [key, weak] : bindings_) {
      if (auto binding = weak.lock()) bindings.push_back(std::move(binding));
    }
  }
  bool is_anybody_within = false;
  for (const auto& binding : bindings) {
    for (OperationSlot* slot : binding->fail(why, Binding::kNever)) retire(*slot, why);
    is_anybody_within = is_anybody_within || binding->has_visitors();
  }
  return is_anybody_within;
}

Status EngineCore::close(std::int64_t deadline_ns) {
  if (fork_guard_.is_forked_child()) return Status::ok();
  std::int64_t by = close_by_ns_.load();
  while (deadline_ns < by && !close_by_ns_.compare_exchange_weak(by, deadline_ns)) {
  }
  const MutexLock lock(close_mutex_);
  if (is_closed_.exchange(true, std::memory_order_seq_cst)) return Status::ok();
  Status outcome = Status::ok();

  // What waits for a peer ends now; what runs is given time, then told to stop.
  std::vector<std::shared_ptr<RegionRecord>> regions;
  {
    const MutexLock tables(mutex_);
    for (auto& [id, record] : regions_) regions.push_back(record);
  }
  while (end_waiting(closed()) || counters_.running.load(std::memory_order_seq_cst) != 0) {
    if (now_ns() >= close_by_ns_.load()) {
      outcome = Status(Code::kTimedOut, "transfers were still running when the engine closed");
      break;
    }
    usleep(200);
  }
  for (const auto& record : regions) {
    Status region;
    do {
      region = close_region(record, std::min(close_by_ns_.load(), now_ns() + kCloseSliceNs));
    } while (region.code() == Code::kTimedOut && now_ns() < close_by_ns_.load());
    if (outcome.is_ok()) outcome = region;
  }
  // Those who do not leave by themselves are cut off with it.
  loop_.post([this] {
    // The address first: who hears the goodbye and finds it taken takes that for another engine.
    for (OwnedFd* listener : {&listener_, &host_listener_}) {
      if (!listener->is_valid()) continue;
      loop_.unwatch(listener->get());
      sockets_.remove(listener->get());
      listener->reset();
    }
    for (const auto& endpoint : std::vector(endpoints_)) {
      endpoint->say_bye(Status(Code::kClosed, "its engine was closed"), PeerFate::kUnknown);
    }
  });
  loop_.stop();
  (void)end_waiting(closed());
  for (CreditWaiter& waiter : credit_waiters_) {
    if (waiter.slot != nullptr) retire(*waiter.slot, closed());
  }
  credit_waiters_.clear();
  // Running copies have seen their channels lost by now and end with the next chunk.
  const std::int64_t stop_by = std::max(close_by_ns_.load(), now_ns() + kCutPatienceNs);
  for (const auto& transport : transports_) {
    if (transport->stop(stop_by)) continue;
    keep_for_ever(shared_from_this());
    outcome = Status(Code::kTimedOut,
                     "a thread of the engine stands in a copy, since the memory there does not "
                     "answer; the engine is closed, and what that thread uses is kept for ever");
  }
  doorbell_.ring();
  const bool is_haunted = look_at_quarantine();
  if (is_haunted) {
    const MutexLock quarantine(quarantine_mutex_);
    for (const auto& region : quarantine_) keep_for_ever(region);
  }
  const MutexLock tables(mutex_);
  if (has_arrivals_fd_.load(std::memory_order_seq_cst)) doorbell_.set_event();
  set_drained(std::make_shared<const Endpoints>());
  // Whoever asks again must be told of those who are still within.
  if (!is_haunted) doubtful_.clear();
  sockets_.forget_all();
  if (trace_) trace_->flush();
  return outcome;
}

// --- Memory ---

Result<Region> EngineCore::register_memory(std::span<const TensorSpec> tensors) {
  Status status = usable();
  if (!status.is_ok()) return status;
  if (tensors.empty()) return Status(Code::kInvalidArgument, "there is nothing to register");
  auto record = std::make_shared<RegionRecord>();
  std::unordered_set<std::string_view> names;
  // All are looked at before anything is done, so that a refusal leaves nothing behind.
  for (const TensorSpec& tensor : tensors) {
    const std::string which = tensor.name.empty() ? "" : "tensor '" + tensor.name + "': ";
    TensorView view;
    view.dtype = tensor.dtype;
    view.offset = tensor.data - tensor.storage_data;
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      view.axes.push_back({tensor.shape[i], tensor.strides_bytes[i], nullptr});
    }
    status = check_within(view, tensor.storage_nbytes);
    if (!status.is_ok()) return Status(status.code(), which + std::string(status.text()));
    if (view.nbytes() == 0) {
      return Status(Code::kInvalidArgument,
                    which + view.describe() + " has no bytes; there is nothing to register");
    }
    if (!names.insert(tensor.name).second) {
      return Status(Code::kInvalidArgument,
                    "two tensors of the group are named '" + tensor.name + "'");
    }
    record->layout.tensors.push_back(std::move(view));
    if (!tensor.name.empty()) record->layout.names.push_back(tensor.name);
  }
  auto memory = std::make_shared<RegionMemory>();
  memory->region = record;
  record->engine = this;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::shared_ptr<LocalStorage> storage = storages_.acquire(tensors[i]);
    const auto known = std::find(memory->storages.begin(), memory->storages.end(), storage);
    TensorView& view = record->layout.tensors[i];
    view.storage = static_cast<std::uint32_t>(known - memory->storages.begin());
    view.offset = tensors[i].data - storage->data;
    if (known == memory->storages.end()) {
      memory->storages.push_back(std::move(storage));
    } else {
      storages_.release(storage);  // One region counts each storage once.
    }
  }
  const auto give_up = [&](Status why) {
    for (const auto& storage : memory->storages) storages_.release(storage);
    return why;
  };
  // Where all peers are reached by devices, what a device does not take is refused here and not when
  // the first peer comes.
  if (std::none_of(transports_.begin(), transports_.end(),
                   [](const auto& transport) { return transport->is_local(); })) {
    for (const auto& transport : transports_) {
      for (const auto& storage : memory->storages) {
        if (Status prepared = transport->prepare(storage->piece()); !prepared.is_ok()) {
          return give_up(std::move(prepared));
        }
      }
    }
  }
  if (memory->storages.size() > kMostStorages) {
    return give_up(Status(Code::kLimitExceeded,
                          "the group lies in " + std::to_string(memory->storages.size()) +
                              " separate storages, 4096 fit into one region; register several "
                              "groups, or allocate the tensors as views of fewer storages"));
  }
  {
    const MutexLock lock(record->mutex);
    record->memory = memory;
  }
  UniqueLock lock(mutex_);
  if (is_closed_.load(std::memory_order_acquire)) {
    lock.unlock();
    return give_up(closed());
  }
  record->id = next_region_++;
  regions_[record->id] = record;
  return Region(shared_from_this(), record);
}

Result<LocalView> EngineCore::find_or_borrow(const TensorSpec& tensor) {
  LocalView out;
  TensorView view;
  view.dtype = tensor.dtype;
  view.offset = tensor.data - tensor.storage_data;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    view.axes.push_back({tensor.shape[i], tensor.strides_bytes[i], nullptr});
  }
  Status status = check_within(view, tensor.storage_nbytes);
  if (!status.is_ok()) return status;
  auto memory = std::make_shared<RegionMemory>();
  std::shared_ptr<LocalStorage> storage =
      storages_.find(tensor.storage_data, tensor.storage_nbytes);
  if (storage) {
    view.offset = tensor.data - storage->data;
  } else if (options_.strict) {
    return Status(Code::kNotRegistered,
                  view.describe() +
                      " is not registered, and this engine is strict; register its "
                      "storage first (" +
                      storages_.describe_nearest(tensor.data) + ")");
  } else {
    storage = storages_.make_temporary(tensor);
    view.offset = tensor.data - storage->data;
    counters_.temporary.fetch_add(1, std::memory_order_relaxed);
  }
  memory->storages.push_back(std::move(storage));
  out.memory = std::move(memory);
  out.view.tensors.push_back(std::move(view));
  return out;
}

Result<std::shared_ptr<const GrantRecord>> EngineCore::whole_grant(RegionRecord& record) {
  Status status = usable();
  if (!status.is_ok()) return status;
  const MutexLock lock(record.mutex);
  if (!record.memory) return region_closed();
  if (!record.whole) {
    Result<std::shared_ptr<const GrantRecord>> grant =
        grants_.add(Access::kBoth, record.layout.nbytes(), record.memory);
    if (!grant.is_ok()) return grant;
    record.whole = *grant;
    record.grants[record.whole->id] = {record.whole, record.memory};
  }
  return record.whole;
}

Result<Grant> EngineCore::grant(const LocalView& view, Access access) {
  Status status = usable();
  if (!status.is_ok()) return status;
  const std::shared_ptr<RegionRecord> region = view.memory->region.lock();
  if (!region || region->engine != this) {
    return Status(Code::kNotRegistered,
                  "only a part of a region that this engine has registered can be granted");
  }
  // Only what the view touches: a holder imports no more than it needs.
  auto memory = std::make_shared<RegionMemory>();
  memory->region = region;
  View granted = view.view;
  for (TensorView& tensor : granted.tensors) {
    const auto& storage = view.memory->storages[tensor.storage];
    const auto known = std::find(memory->storages.begin(), memory->storages.end(), storage);
    tensor.storage = static_cast<std::uint32_t>(known - memory->storages.begin());
    if (known == memory->storages.end()) memory->storages.push_back(storage);
  }
  const MutexLock lock(region->mutex);
  if (!region->memory) return region_closed();
  Result<std::shared_ptr<const GrantRecord>> record =
      grants_.add(access, granted.nbytes(), memory);
  if (!record.is_ok()) return record.status();
  region->grants[(*record)->id] = {*record, std::move(memory)};
  return Grant(shared_from_this(), *record, std::move(granted));
}

Result<HandleInfo> EngineCore::describe(const GrantRecord& grant, const View& view) const {
  Status status = usable();
  if (!status.is_ok()) return status;
  const std::shared_ptr<const RegionMemory> memory = grant.memory.lock();
  if (!memory || is_revoked(grant)) {
    return Status(Code::kRevoked, "the grant is revoked, or its region is closed");
  }
  HandleInfo info;
  info.incarnation = incarnation_;
  info.engine_name = options_.name;
  info.addresses.push_back({AddressKind::kUnix, address_});
  for (const std::string& address : addresses_) {
    info.addresses.push_back({AddressKind::kTcp, address});
  }
  info.grant_id = grant.id;
  info.access = grant.access;
  info.key = grant.key;
  for (const auto& storage : memory->storages) info.storage_nbytes.push_back(storage->nbytes);
  info.view = view;
  return info;
}

Result<Catalog> EngineCore::catalog() {
  std::vector<std::shared_ptr<RegionRecord>> regions;
  {
    const MutexLock lock(mutex_);
    for (const auto& [id, record] : regions_) regions.push_back(record);
  }
  std::vector<Catalog::Region> found;
  for (const auto& record : regions) {
    Result<std::shared_ptr<const GrantRecord>> grant = whole_grant(*record);
    // One that is being closed is not there any more.
    if (grant.status().code() == Code::kClosed && usable().is_ok()) continue;
    if (!grant.is_ok()) return grant.status();
    const std::shared_ptr<const RegionMemory> memory = (*grant)->memory.lock();
    Result<HandleInfo> info = describe(**grant, record->layout);
    if (!memory || info.status().code() == Code::kRevoked) continue;
    if (!info.is_ok()) return info.status();
    Catalog::Region region;
    region.handle.view = info->view;
    region.handle.handle = std::make_shared<RemoteView::Shared>();
    region.handle.handle->info = info.take();
    for (const auto& storage : memory->storages) {
      region.storage_addresses.push_back(reinterpret_cast<std::uint64_t>(storage->data));
    }
    found.push_back(std::move(region));
  }
  return Catalog(options_.name, std::move(found));
}

Result<std::string> EngineCore::explain(const RemoteView& target) {
  const auto resolved = binding_for(target).resolved();
  if (!resolved) {
    return Status(Code::kPeerLost, "the handle's engine is not connected; connect first");
  }
  if (resolved->endpoint->is_lost()) return resolved->endpoint->why();
  const PeerInfo& peer = *resolved->endpoint->info();
  std::string out = "engine '" + peer.engine_name + "' " +
                    (peer.address.empty() ? "on this host, pid " + std::to_string(peer.pid)
                                          : "at " + peer.address);
  for (std::size_t i = 0; i < resolved->memories.size(); ++i) {
    // Storages of one group may lie in memory of different kinds.
    const std::string way = resolved->channel->explain(*resolved->memories[i]);
    if (i > 0 && way == resolved->channel->explain(*resolved->memories[i - 1])) continue;
    out += "\n" + std::string(resolved->transport) + ": " + way;
  }
  // In the order of preference: those before it cannot be used, those after it are not needed.
  for (const TransportInfo& info : list_transports()) {
    if (info.name == resolved->transport) break;
    std::string why = info.is_available ? "this engine was made without it" : info.reason;
    for (const auto& [name, reason] : resolved->passed_over) {
      if (name == info.name) why = reason;
    }
    out += "\nnot " + std::string(info.name) + ": " + why;
  }
  return out;
}

bool EngineCore::is_revoked(const GrantRecord& grant) const {
  return grants_.find(grant.id) == nullptr;
}

// --- Revoking ---

EngineCore::Endpoints EngineCore::everyone() const {
  const MutexLock lock(mutex_);
  Endpoints endpoints = *drained_;
  endpoints.insert(endpoints.end(), doubtful_.begin(), doubtful_.end());
  return endpoints;
}

Status EngineCore::fence_everywhere(std::span<const FenceTicket> grants, std::int64_t deadline_ns,
                                    Force force) {
  Status outcome;
  for (const auto& endpoint : everyone()) {
    Status fenced = endpoint->fence(grants, deadline_ns);
    if (fenced.code() == Code::kTimedOut && force == Force::kYes) {
      fenced = endpoint->cut_off(
          Status(Code::kPeerLost,
                 "it was cut off: it did not leave a revoked grant in time (force=True)"),
          std::max(deadline_ns, now_ns() + kCutPatienceNs));
    }
    if (outcome.is_ok()) outcome = fenced;
  }
  return outcome;
}

void EngineCore::shut(RegionRecord& region, const GrantRecord* only, Fate fate) {
  std::unordered_map<std::uint64_t, RegionRecord::LiveGrant> shut;
  const MutexLock lock(region.mutex);
  if (fate == Fate::kClosed && region.memory) region.leaving = std::move(region.memory);
  if (only == nullptr) {
    shut.swap(region.grants);
  } else if (auto node = region.grants.extract(only->id)) {
    shut.insert(std::move(node));
  }
  for (const auto& [id, grant] : shut) {
    if (region.whole == grant.record) region.whole.reset();
    grants_.revoke(*grant.record);
    region.unfenced.push_back({grant.record->fence, grant.record->nbytes});
  }
}

Status EngineCore::settle(const std::shared_ptr<RegionRecord>& region,
                          std::optional<FenceTicket> only, std::int64_t deadline_ns, Force force) {
  std::vector<FenceTicket> fences;
  {
    const MutexLock lock(region->mutex);
    for (const RegionRecord::Revoked& each : region->unfenced) {
      if (!only || (only->slot == each.fence.slot && only->epoch == each.fence.epoch)) {
        fences.push_back(each.fence);
      }
    }
  }
  std::sort(fences.begin(), fences.end(), [](const auto& a, const auto& b) { return a.slot < b.slot; });
  Status fenced = fences.empty() ? Status() : fence_everywhere(fences, deadline_ns, force);
  if (fenced.is_ok()) {
    forget_fenced(*region, fences);
    return fenced;
  }
  // Perhaps only one of them holds somebody.
  for (const FenceTicket& each : fences) {
    if (fence_everywhere({&each, 1}, 0, Force::kNo).is_ok()) forget_fenced(*region, {&each, 1});
  }
  const MutexLock lock(quarantine_mutex_);
  if (std::find(quarantine_.begin(), quarantine_.end(), region) == quarantine_.end()) {
    quarantine_.push_back(region);
  }
  if (!std::exchange(is_quarantine_watched_, true)) {
    loop_.post([this] { watch_quarantine(kFirstRetryNs); });
  }
  return fenced;
}

void EngineCore::forget_fenced(RegionRecord& region, std::span<const FenceTicket> grants) {
  std::shared_ptr<const RegionMemory> leaving;
  {
    const MutexLock lock(region.mutex);
    std::erase_if(region.unfenced, [grants](const RegionRecord::Revoked& each) {
      return std::binary_search(
          grants.begin(), grants.end(), each.fence,
          [](const FenceTicket& a, const FenceTicket& b) { return a.slot < b.slot; });
    });
    for (const FenceTicket& grant : grants) grants_.retire(grant);
    if (region.unfenced.empty()) leaving = std::move(region.leaving);
  }
  if (leaving) let_go(*leaving);
}

void EngineCore::let_go(const RegionMemory& memory) {
  std::vector<std::uint64_t> gone;
  for (const auto& storage : memory.storages) {
    if (storages_.release(storage)) gone.push_back(storage->id);
  }
  if (gone.empty()) return;
  loop_.post([this, gone] {
    for (const auto& endpoint : std::vector(endpoints_)) {
      for (const std::uint64_t id : gone) endpoint->release_storage(id);
    }
  });
}

bool EngineCore::look_at_quarantine() {
  std::vector<std::shared_ptr<RegionRecord>> regions;
  {
    const MutexLock lock(quarantine_mutex_);
    regions = quarantine_;
  }
  for (const auto& region : regions) {
    std::vector<RegionRecord::Revoked> unfenced;
    {
      const MutexLock lock(region->mutex);
      unfenced = region->unfenced;
    }
    for (const RegionRecord::Revoked& each : unfenced) {
      if (!fence_everywhere({&each.fence, 1}, 0, Force::kNo).is_ok()) continue;
      forget_fenced(*region, {&each.fence, 1});
    }
  }
  const MutexLock lock(quarantine_mutex_);
  std::erase_if(quarantine_, [](const std::shared_ptr<RegionRecord>& region) {
    const MutexLock inner(region->mutex);
    return region->unfenced.empty();
  });
  return !quarantine_.empty();
}

// Looks without waiting: the control thread has others to serve. A stopped writer keeps the memory
// for as long as it is stopped.
void EngineCore::watch_quarantine(std::int64_t pause_ns) {
  if (look_at_quarantine()) {
    loop_.run_at(now_ns() + pause_ns,
                 [this, pause_ns] { watch_quarantine(std::min(2 * pause_ns, kSecondNs)); });
    return;
  }
  const MutexLock lock(quarantine_mutex_);
  is_quarantine_watched_ = !quarantine_.empty();
  if (is_quarantine_watched_) loop_.post([this] { watch_quarantine(kFirstRetryNs); });
}

Status EngineCore::revoke_grant(const std::shared_ptr<const GrantRecord>& grant,
                                std::int64_t deadline_ns, Force force) {
  if (fork_guard_.is_forked_child()) return usable();
  const std::shared_ptr<RegionRecord> region = grant->region.lock();
  if (!region) return Status::ok();  // Closed, and nobody is left within.
  shut(*region, grant.get(), Fate::kKept);
  return settle(region, grant->fence, deadline_ns, force);
}

Status EngineCore::revoke_region(const std::shared_ptr<RegionRecord>& record,
                                 std::int64_t deadline_ns, Force force) {
  if (fork_guard_.is_forked_child()) return usable();
  shut(*record, nullptr, Fate::kKept);
  return settle(record, std::nullopt, deadline_ns, force);
}

Status EngineCore::close_region(std::shared_ptr<RegionRecord> record, std::int64_t deadline_ns) {
  if (fork_guard_.is_forked_child()) return usable();
  shut(*record, nullptr, Fate::kClosed);
  {
    const MutexLock lock(mutex_);
    regions_.erase(record->id);
  }
  return settle(record, std::nullopt, deadline_ns, Force::kNo);
}

void EngineCore::close_region_later(std::shared_ptr<RegionRecord> record) {
  if (fork_guard_.is_forked_child()) return;
  // When the loop has stopped the engine is closed, and so is the region.
  loop_.post([this, record = std::move(record)] { (void)close_region(record, 0); });
}

// --- Transfers ---

Binding& EngineCore::binding_for(const RemoteView& view) {
  RemoteView::Shared& handle = *view.handle;
  if (void* const kept = handle.find(incarnation_)) return *static_cast<Binding*>(kept);
  std::shared_ptr<Binding> binding;
  {
    // Two handles of one grant share its binding, if they carry the same key.
    const std::pair key(handle.info.incarnation, handle.info.grant_id);
    const MutexLock lock(mutex_);
    const auto [begin, end] = bindings_.equal_range(key);
    for (auto at = begin; at != end && !binding; ++at) {
      binding = at->second.lock();
      if (binding && !equal_in_constant_time(binding->info().key, handle.info.key)) binding.reset();
    }
    if (!binding) {
      if (bindings_.size() >= bindings_sweep_) {
        std::erase_if(bindings_, [](const auto& entry) { return entry.second.expired(); });
        bindings_sweep_ = std::max<std::size_t>(64, 2 * bindings_.size());
      }
      binding = std::make_shared<Binding>(handle.info);
      bindings_.emplace(key, binding);
    }
  }
  return *static_cast<Binding*>(handle.keep(incarnation_, std::move(binding)));
}

Status EngineCore::fill(OperationSlot& slot, std::span<const TransferItem> items) {
  std::uint64_t pieces = 0;
  for (const TransferItem& item : items) {
    Status same = check_same_layout(item.local->view, item.remote->view);
    if (!same.is_ok()) return same;
    for (std::size_t i = 0; i < item.local->view.tensors.size(); ++i) {
      const TensorView& local = item.local->view.tensors[i];
      const TensorView& remote = item.remote->view.tensors[i];
      const TensorView& written = slot.direction == Direction::kPut ? remote : local;
      Status disjoint = check_no_overlap(written);
      if (!disjoint.is_ok()) return disjoint;
      const LocalStorage& storage = *item.local->memory->storages[local.storage];
      const auto first = static_cast<std::uint32_t>(slot.runs.size());
      pieces += cut_runs(local, storage.data, remote, slot.runs, kMostRuns - pieces);
      if (pieces > kMostRuns) {
        return Status(Code::kLimitExceeded,
                      "the transfer falls into more than " + std::to_string(kMostRuns) +
                          " separate pieces, since no two neighbours of " + local.describe() +
                          " are neighbours on both sides; make one side contiguous in the other's "
                          "order first, or split it");
      }
      const auto count = static_cast<std::uint32_t>(slot.runs.size()) - first;
      if (count == 0) continue;
      slot.segments.push_back({first, count, nullptr, storage.piece()});
      slot.segment_storage.push_back(remote.storage);
      slot.nbytes += local.nbytes();
    }
    slot.pins.push_back(item.local->memory);
  }
  slot.run_count = slot.runs.size();
  return check_targets_disjoint(slot);
}

Status EngineCore::fill(OperationSlot& slot, const TransferItem& item, const Run& run) {
  const LocalStorage& storage = *item.local->memory->storages[item.local->view.tensors[0].storage];
  slot.runs.push_back(run);
  slot.segments.push_back({0, 1, nullptr, storage.piece()});
  slot.segment_storage.push_back(item.remote->view.tensors[0].storage);
  slot.nbytes = run.nbytes;
  slot.run_count = 1;
  slot.pins.push_back(item.local->memory);
  return Status::ok();
}

Status EngineCore::fill(OperationSlot& slot, const RunCutter& cutter) {
  RunList runs(slot);
  if (Status cut = cutter.cut(runs); !cut.is_ok()) return cut;
  if (slot.runs.size() > kMostRuns) {
    return Status(Code::kLimitExceeded, "the transfer has more than " + std::to_string(kMostRuns) +
                                            " runs");
  }
  for (std::size_t i = 0; i < slot.segments.size(); ++i) {
    const std::size_t end =
        i + 1 < slot.segments.size() ? slot.segments[i + 1].first_run : slot.runs.size();
    slot.segments[i].run_count = static_cast<std::uint32_t>(end - slot.segments[i].first_run);
  }
  for (const Run& run : slot.runs) slot.nbytes += run.nbytes;
  slot.run_count = slot.runs.size();
  slot.pins.push_back(cutter.local());
  return Status::ok();
}

// Each target alone was checked when its runs were cut; here, no byte may be in two of them.
Status EngineCore::check_targets_disjoint(const OperationSlot& slot) {
  struct Piece {
    std::uint64_t space;  // What the addresses belong to.
    std::uint64_t begin;
    std::uint64_t end;
    bool operator<(const Piece& other) const {
      return std::tie(space, begin) < std::tie(other.space, other.begin);
    }
  };
  const auto piece_of = [&](std::size_t segment, const Run& run) {
    if (slot.direction == Direction::kPut) {
      return Piece{slot.segment_storage[segment], run.remote, run.remote + run.nbytes};
    }
    const auto begin = reinterpret_cast<std::uint64_t>(run.local);
    return Piece{0, begin, begin + run.nbytes};
  };
  const auto are_disjoint = [](std::vector<Piece>& pieces) {
    std::sort(pieces.begin(), pieces.end());
    return std::adjacent_find(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
             return a.space == b.space && b.begin < a.end;
           }) == pieces.end();
  };
  if (slot.segments.size() < 2) return Status::ok();
  // Mostly the hulls of the targets are disjoint already, and that is quickly seen.
  std::vector<Piece> pieces;
  for (std::size_t s = 0; s < slot.segments.size(); ++s) {
    const Run* run = &slot.runs[slot.segments[s].first_run];
    Piece hull = piece_of(s, *run);
    for (std::uint32_t i = 1; i < slot.segments[s].run_count; ++i) {
      const Piece each = piece_of(s, run[i]);
      hull.begin = std::min(hull.begin, each.begin);
      hull.end = std::max(hull.end, each.end);
    }
    pieces.push_back(hull);
  }
  if (are_disjoint(pieces)) return Status::ok();
  pieces.clear();
  for (std::size_t s = 0; s < slot.segments.size(); ++s) {
    for (std::uint32_t i = 0; i < slot.segments[s].run_count; ++i) {
      pieces.push_back(piece_of(s, slot.runs[slot.segments[s].first_run + i]));
    }
  }
  if (are_disjoint(pieces)) return Status::ok();
  return Status(Code::kInvalidArgument,
                "two targets of the transfer share bytes; each byte can be written once per "
                "transfer");
}

// Where source and target are one memory, a copy must not run into itself: no byte may be read and
// written by one transfer. Requires: the segments' remote memories are filled in.
bool EngineCore::do_runs_meet(const OperationSlot& slot) {
  using Bytes = std::pair<std::int64_t, std::int64_t>;  // Begin and end, in the remote memory.
  // Made where it is needed: mostly the memories are those of two processes.
  std::optional<std::unordered_map<const RemoteMemory*, std::vector<Bytes>>> targets;
  const auto ranges_in = [&](const RemoteMemory* memory) -> const std::vector<Bytes>& {
    if (!targets) targets.emplace();
    const auto [at, is_new] = targets->try_emplace(memory);
    if (!is_new) return at->second;
    for (const Segment& segment : slot.segments) {
      if (segment.remote != memory) continue;
      for (std::uint32_t i = 0; i < segment.run_count; ++i) {
        const Run& run = slot.runs[segment.first_run + i];
        at->second.emplace_back(run.remote, run.remote + run.nbytes);
      }
    }
    // What is read may overlap itself: merged, so that looking at one neighbour is enough.
    std::vector<Bytes>& ranges = at->second;
    std::sort(ranges.begin(), ranges.end());
    std::size_t kept = 0;
    for (const Bytes& each : ranges) {
      if (kept > 0 && each.first <= ranges[kept - 1].second) {
        ranges[kept - 1].second = std::max(ranges[kept - 1].second, each.second);
      } else {
        ranges[kept++] = each;
      }
    }
    ranges.resize(kept);
    return ranges;
  };
  for (std::size_t s = 0; s < slot.segments.size(); ++s) {
    const MemoryPiece& local = slot.segments[s].local;
    const RemoteMemory* last = nullptr;
    for (const Segment& other : slot.segments) {
      if (std::exchange(last, other.remote) == other.remote) continue;
      const std::optional<std::int64_t> base = other.remote->offset_of(local);
      if (!base) continue;
      const std::vector<Bytes>& written = ranges_in(other.remote);
      const Segment& segment = slot.segments[s];
      for (std::uint32_t i = 0; i < segment.run_count; ++i) {
        const Run& run = slot.runs[segment.first_run + i];
        const std::int64_t begin = *base + (run.local - local.data);
        const std::int64_t end = begin + static_cast<std::int64_t>(run.nbytes);
        // The last one that begins before this one's end.
        const auto after = std::lower_bound(written.begin(), written.end(), Bytes(end, 0));
        if (after == written.begin() || std::prev(after)->second <= begin) continue;
        return true;
      }
    }
  }
  return false;
}

Status EngineCore::dispatch(OperationSlot& slot, const Binding::Resolved& resolved) {
  Status ready;
  try {
    ready = prepare(slot, resolved);
  } catch (const std::bad_alloc&) {
    ready = Status::out_of_memory();
  }
  if (!ready.is_ok()) {
    if (std::exchange(slot.has_credit, false)) resolved.channel->return_credit(slot.tag.nbytes);
    return ready;
  }
  resolved.channel->post(slot);
  return Status::ok();
}

// All that a post needs; what throws or fails has moved nothing.
Status EngineCore::prepare(OperationSlot& slot, const Binding::Resolved& resolved) {
  if (slot.has_tag && !slot.has_credit) {
    Status credit = resolved.channel->take_credit(slot.tag.nbytes);
    if (!credit.is_ok()) return credit;
    slot.has_credit = true;
  }
  for (std::size_t i = 0; i < slot.segments.size(); ++i) {
    slot.segments[i].remote = resolved.memories[slot.segment_storage[i]].get();
  }
  // Of one run, like most, that is quickly seen.
  const bool is_into_itself =
      slot.runs.size() == 1
          ? runs_into_itself(slot.runs[0], slot.segments[0].local, *slot.segments[0].remote)
          : do_runs_meet(slot);
  if (is_into_itself) {
    return Status(Code::kInvalidArgument,
                  "source and target overlap: they share bytes of one allocation");
  }
  if (slot.nbytes == 0) {
    // Nothing will be copied, so nothing else looks whether the grant still holds.
    if (Status held = resolved.channel->look_at_grant(resolved.fence); !held.is_ok()) {
      slot.fail(std::move(held));
    }
  }
  slot.fence = resolved.fence;
  slot.transport.store(resolved.transport, std::memory_order_relaxed);
  slot.road = resolved.endpoint;
  slot.traffic = &resolved.traffic->in(slot.direction);
  if (trace_ || slot.has_waited) slot.posted_ns = now_ns();
  slot.pins.push_back(resolved.shared_from_this());
  return Status::ok();
}

void EngineCore::abandon(OperationSlot* slot) {
  // Ended, so that nobody who might look at it waits.
  slot->state.end(Status(never_started), 0);
  counters_.running.fetch_sub(1, std::memory_order_seq_cst);
  wake_for_room();
  deadlines_.remove(*slot);
  slot->pins.clear();
  release(*slot);
  release(*slot);
}

Status EngineCore::after_loss(const HandleInfo& handle, Status why) const {
  if (why.code() != Code::kPeerLost && why.code() != Code::kRevoked) return why;
  {
    const MutexLock lock(mutex_);
    const auto lost = lost_peers_.find(handle.incarnation);
    if (lost == lost_peers_.end() || !lost->second.has_ended) return why;
  }
  // It is no more, so whoever listens at its address is another.
  for (const EngineAddress& address : handle.addresses) {
    if (address.kind == AddressKind::kUnix && connect_to(address.text).is_ok()) {
      return Status(Code::kStaleHandle, "the handle is from an earlier life of engine '" +
                                            handle.engine_name +
                                            "', which has restarted since; ask it for a fresh "
                                            "handle");
    }
  }
  return why;
}

Result<OperationSlot*> EngineCore::begin(Direction direction, const TransferOptions& options) {
  if (options.notify && options.notify->size() > kMaxTagBytes) {
    return Status(Code::kInvalidArgument, "the notify tag has " +
                                              std::to_string(options.notify->size()) + " bytes; " +
                                              std::to_string(kMaxTagBytes) + " fit");
  }
  // The counter first, the closed flag after it: close() looks in the other order. All four looks
  // are sequentially consistent, so that one of the two sees the other.
  if (counters_.running.fetch_add(1, std::memory_order_seq_cst) >= options_.max_transfers) {
    counters_.running.fetch_sub(1, std::memory_order_seq_cst);
    wake_for_room();  // Somebody may have seen the one too many.
    return Status(Code::kWouldBlock, std::to_string(options_.max_transfers) +
                                         " transfers are running, which is as many as this engine "
                                         "was made for");
  }
  OperationSlot* slot = nullptr;
  try {
    slot = operations_.take();
    if (trace_) slot->label = options.label;
  } catch (const std::bad_alloc&) {
    if (slot != nullptr) operations_.give_back(slot);
    counters_.running.fetch_sub(1, std::memory_order_seq_cst);
    wake_for_room();
    return Status::out_of_memory();
  }
  slot->begin_references(2);  // One for the running operation, one for the caller's Transfer.
  slot->state.restart(now_ns());
  slot->direction = direction;
  slot->after = options.after;
  if (options.notify) {
    slot->has_tag = true;
    slot->tag.nbytes = static_cast<std::uint8_t>(options.notify->size());
    std::memcpy(slot->tag.bytes, options.notify->data(), options.notify->size());
  }
  if (!is_usable()) {
    abandon(slot);
    return usable();
  }
  return slot;
}

void EngineCore::set_deadline(OperationSlot& slot, std::int64_t deadline_ns) {
  if (deadline_ns == INT64_MAX) return;
  if (deadline_ns <= slot.state.submitted_ns()) return slot.fail(deadline_passed());
  deadlines_.add(slot, deadline_ns);
  // Otherwise the timer that runs fires earlier, and sets itself for this one.
  if (deadline_ns < deadline_timer_ns_.load(std::memory_order_seq_cst)) {
    loop_.post([this] { watch_deadlines(); });
  }
}

Status EngineCore::may_move(Direction direction, const HandleInfo& handle) {
  if (is_granted(direction, handle)) return Status::ok();
  if (handle.device_kind != 0) {
    return Status(Code::kUnsupported,
                  "the handle's memory lies on a device, which this version does not reach");
  }
  return Status(Code::kAccessDenied, direction == Direction::kPut
                                         ? "the handle grants get only; ask the owner for one "
                                           "with access='put' or 'both'"
                                         : "the handle grants put only; ask the owner for one "
                                           "with access='get' or 'both'");
}

const Binding::Resolved* EngineCore::way_of(const Binding::Visit& visit) {
  const Binding::Resolved* const resolved = visit.resolved();
  return resolved == nullptr || resolved->endpoint->is_lost() ? nullptr : resolved;
}

Result<Transfer> EngineCore::try_submit(Direction direction, std::span<const TransferItem> items,
                                        const TransferOptions& options, Purpose purpose) {
  if (!is_usable()) return usable();
  if (items.empty()) return Status(Code::kInvalidArgument, "there is nothing to move");
  const RemoteView& remote = *items[0].remote;
  for (const TransferItem& item : items) {
    const HandleInfo& handle = item.remote->handle->info;
    if (!is_granted(direction, handle)) return may_move(direction, handle);
    if (item.remote->handle != remote.handle &&
        (handle.incarnation != remote.handle->info.incarnation ||
         handle.grant_id != remote.handle->info.grant_id)) {
      return Status(Code::kInvalidArgument,
                    "all remote views of one transfer come from one handle; register what belongs "
                    "together as a group, or start one transfer per handle");
    }
  }
  Binding& binding = binding_for(remote);
  const Binding::Visit visit(binding);
  const Binding::Resolved* const way = way_of(visit);
  // Most are one contiguous run: cut at once, since then there is nothing to check between the views.
  std::optional<Run> run;
  if (items.size() == 1 && items[0].local->view.tensors.size() == 1 &&
      remote.view.tensors.size() == 1) {
    const TensorView& local = items[0].local->view.tensors[0];
    run = one_run(local, items[0].local->memory->storages[local.storage]->data,
                  remote.view.tensors[0]);
  }
  if (run && way != nullptr && way->channel->is_prompt()) {
    if (std::optional<Transfer::Ended> ended = try_now(direction, items[0], *run, options, *way)) {
      return Result<Transfer>(std::in_place, *std::move(ended));
    }
  }
  return submit(direction, binding, way, options, purpose, [&](OperationSlot& slot) {
    return run ? fill(slot, items[0], *run) : fill(slot, items);
  });
}

Result<Transfer> EngineCore::try_run(Direction direction, const RunCutter& cutter,
                                     const TransferOptions& options) {
  Status status = usable();
  if (status.is_ok()) status = may_move(direction, cutter.remote().handle->info);
  if (!status.is_ok()) return status;
  Binding& binding = binding_for(cutter.remote());
  const Binding::Visit visit(binding);
  return submit(direction, binding, way_of(visit), options, Purpose::kPut,
                [&](OperationSlot& slot) { return fill(slot, cutter); });
}

std::optional<Transfer::Ended> EngineCore::try_now(Direction direction, const TransferItem& item,
                                                   const Run& run, const TransferOptions& options,
                                                   const Binding::Resolved& resolved) {
  if (trace_) return std::nullopt;
  if (options.notify && options.notify->size() > kMaxTagBytes) return std::nullopt;
  // After the visit is announced: close() looks in the other order.
  if (is_closed_.load(std::memory_order_seq_cst)) return std::nullopt;
  const LocalStorage& storage = *item.local->memory->storages[item.local->view.tensors[0].storage];
  RemoteMemory& memory = *resolved.memories[item.remote->view.tensors[0].storage];
  if (runs_into_itself(run, storage.piece(), memory)) return std::nullopt;

  Traffic& traffic = resolved.traffic->in(direction);
  const bool is_small = run.nbytes <= kUntimedBytes;
  const bool is_timed = !is_small || traffic.is_to_be_timed();
  const std::int64_t now = now_ns();
  if (options.deadline_ns <= now) return std::nullopt;
  std::optional<Status> status = resolved.channel->do_now(
      {direction, &memory, run, resolved.fence, options.notify ? &*options.notify : nullptr});
  if (!status) return std::nullopt;
  std::optional<Transfer::Ended> out(std::in_place);  // Made where it is returned.
  Transfer::Ended& ended = *out;
  ended.submitted_ns = now;
  ended.done_ns = is_timed ? now_ns() : ended.submitted_ns;
  if (status->is_ok() && is_small) {
    traffic.count_small(run.nbytes, is_timed ? ended.done_ns - ended.submitted_ns : -1);
  } else if (status->is_ok()) {
    traffic.count_done(run.nbytes, 1, ended.done_ns - ended.submitted_ns, 0);
  } else {
    traffic.count_failed();
    count_failure(*status);
  }
  ended.number = next_number();
  ended.nbytes = run.nbytes;
  ended.transport = resolved.transport;
  ended.status = *std::move(status);
  return out;
}

template <typename Fill>
Result<Transfer> EngineCore::submit(Direction direction, Binding& binding,
                                    const Binding::Resolved* way, const TransferOptions& options,
                                    Purpose purpose, const Fill& fill_slot) {
  Result<OperationSlot*> begun = begin(direction, options);
  if (!begun.is_ok()) {
    // Whoever waits for room waits in vain where nothing goes through any more.
    Status lost = begun.status().code() == Code::kWouldBlock ? binding.failure() : Status::ok();
    return lost.is_ok() ? begun.status() : after_loss(binding.info(), std::move(lost));
  }
  OperationSlot* const slot = *begun;
  // Only one that may wait in it is taken out of it again.
  if (way == nullptr) slot->binding = binding.shared_from_this();
  Status status;
  try {
    set_deadline(*slot, options.deadline_ns);
    status = fill_slot(*slot);
  } catch (const std::exception&) {  // No memory, or a list that no memory would hold.
    status = Status::out_of_memory();
  }
  if (!status.is_ok()) {
    abandon(slot);
    return status;
  }
  if (slot->nbytes == 0 && !slot->has_tag && purpose == Purpose::kPut) {
    // Nothing to move and nobody to tell.
    if (Status lost = binding.failure(); !lost.is_ok()) {
      abandon(slot);
      return after_loss(binding.info(), std::move(lost));
    }
    Transfer transfer(shared_from_this(), slot);
    retire(*slot, Status::ok());
    return transfer;
  }
  std::shared_ptr<const Binding::Resolved> resolved;
  Binding::Next next = Binding::Next::kPost;
  try {
    if (way == nullptr) next = binding.enter(*slot, &resolved, &status);
  } catch (const std::bad_alloc&) {
    abandon(slot);
    return Status::out_of_memory();
  }
  switch (next) {
    case Binding::Next::kPost:
      status = dispatch(*slot, way != nullptr ? *way : *resolved);
      break;
    case Binding::Next::kStart:
      if (!loop_.post([this, keep = slot->binding] { start_binding(keep); })) {
        if (binding.withdraw(*slot, Code::kClosed)) status = closed();
      }
      break;
    case Binding::Next::kFail:
      status = after_loss(binding.info(), std::move(status));
      break;
    case Binding::Next::kWait:
      break;
    case Binding::Next::kEndedStart:
      loop_.post([this, keep = slot->binding] { start_binding(keep); });
      [[fallthrough]];
    case Binding::Next::kEnded: {
      Transfer transfer(shared_from_this(), slot);
      retire(*slot, slot->failure());
      return transfer;
    }
    case Binding::Next::kFull:
      status =
          Status(Code::kWouldBlock, "1024 transfers wait already for the connection to this peer");
      break;
  }
  if (!status.is_ok()) {
    abandon(slot);
    return status;
  }
  return Result<Transfer>(std::in_place, shared_from_this(), slot);
}

Result<Transfer> EngineCore::submit_nothing(const RemoteView& target,
                                            const TransferOptions& options, Purpose purpose) {
  Status status = usable();
  if (!status.is_ok()) return status;
  auto memory = std::make_shared<RegionMemory>();
  memory->storages.push_back(std::make_shared<LocalStorage>());
  LocalView nothing;
  nothing.memory = std::move(memory);
  TensorView empty;
  empty.axes.push_back({0, 1, nullptr});
  nothing.view.tensors.push_back(empty);
  const RemoteView where{target.handle, nothing.view};
  const TransferItem item{&nothing, &where};
  const Direction direction =
      target.handle->info.access == Access::kGet ? Direction::kGet : Direction::kPut;
  return try_submit(direction, {&item, 1}, options, purpose);
}

Result<Transfer> EngineCore::connect(const RemoteView& target) {
  // A transfer without bytes ends when the road is there.
  return submit_nothing(target, {}, Purpose::kConnect);
}

Result<Transfer> EngineCore::try_notify(const RemoteView& target, const TransferOptions& options) {
  return submit_nothing(target, options, Purpose::kPut);
}

std::shared_ptr<Endpoint> EngineCore::endpoint_of(const PeerInfo& peer) const {
  const MutexLock lock(mutex_);
  for (const auto& endpoint : *drained_) {
    if (endpoint->info()->incarnation == peer.incarnation) return endpoint;
  }
  return nullptr;
}

Result<Transfer> EngineCore::try_notify(const PeerInfo& target, const TransferOptions& options) {
  Status status = usable();
  if (status.is_ok()) status = peer_status(target);
  if (!status.is_ok()) return status;
  const std::shared_ptr<Endpoint> endpoint = endpoint_of(target);
  if (!endpoint) {
    return Status(Code::kPeerLost, "engine '" + target.engine_name + "' is not connected any more");
  }
  Result<OperationSlot*> begun = begin(Direction::kPut, options);
  if (!begun.is_ok()) return begun.status();
  OperationSlot* const slot = *begun;
  try {
    set_deadline(*slot, options.deadline_ns);
  } catch (const std::bad_alloc&) {
    abandon(slot);
    return Status::out_of_memory();
  }
  Channel* const channel = endpoint->tag_channel();
  status = channel->take_credit(slot->tag.nbytes);
  if (!status.is_ok()) {
    abandon(slot);
    return status;
  }
  slot->has_credit = true;
  slot->transport.store(endpoint->tag_transport(), std::memory_order_relaxed);
  slot->road = endpoint;
  slot->traffic = &endpoint->tag_traffic().put;
  if (trace_) slot->posted_ns = now_ns();
  Transfer transfer(shared_from_this(), slot);
  channel->post(*slot);
  return transfer;
}

bool EngineCore::wait_for_slot(std::int64_t left_ns) {
  if (counters_.running.load(std::memory_order_acquire) < options_.max_transfers) return false;
  counters_.room_sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = counters_.room_count.load(std::memory_order_seq_cst);
  if (counters_.running.load(std::memory_order_seq_cst) >= options_.max_transfers) {
    futex_wait(counters_.room_count, seen, left_ns, FutexScope::kPrivate);
  }
  counters_.room_sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return true;
}

// Counts how long a thread is within.
class EngineCore::WaitCount {
 public:
  explicit WaitCount(std::atomic<std::int64_t>& total) : total_(total), since_ns_(now_ns()) {}
  ~WaitCount() {
    total_.fetch_add((until_ns_ != 0 ? until_ns_ : now_ns()) - since_ns_, std::memory_order_relaxed);
  }
  WaitCount(const WaitCount&) = delete;
  WaitCount& operator=(const WaitCount&) = delete;
  std::int64_t since_ns() const { return since_ns_; }
  // Says that it ended then, which saves a look at the clock.
  void end_at(std::int64_t ns) { until_ns_ = ns; }

 private:
  std::atomic<std::int64_t>& total_;
  const std::int64_t since_ns_;
  std::int64_t until_ns_ = 0;
};

void EngineCore::wait_for_room(const RemoteView& target, const TransferOptions& options,
                               std::int64_t deadline_ns) {
  const WaitCount count(counters_.accept_wait_ns);
  const std::int64_t left = std::max<std::int64_t>(deadline_ns - count.since_ns(), 0);
  if (left == 0 || !usable().is_ok() || wait_for_slot(left)) return;
  const auto resolved = binding_for(target).resolved();
  if (!resolved) {
    // Full before the connection is there: it will not take long, one way or the other.
    usleep(static_cast<useconds_t>(std::min<std::int64_t>(left / 1000 + 1, 1000)));
    return;
  }
  if (options.notify) resolved->channel->wait_for_credit(options.notify->size(), left);
}

void EngineCore::wait_for_room(const PeerInfo& target, const TransferOptions& options,
                               std::int64_t deadline_ns) {
  const WaitCount count(counters_.accept_wait_ns);
  const std::int64_t left = std::max<std::int64_t>(deadline_ns - count.since_ns(), 0);
  if (left == 0 || !usable().is_ok() || wait_for_slot(left)) return;
  const std::shared_ptr<Endpoint> endpoint = endpoint_of(target);
  if (endpoint && options.notify) {
    endpoint->tag_channel()->wait_for_credit(options.notify->size(), left);
  }
}

void EngineCore::count_failure(const Status& status) {
  counters_.failed.fetch_add(1, std::memory_order_relaxed);
  failed_by_code_[static_cast<std::size_t>(status.code())].fetch_add(1, std::memory_order_relaxed);
}

void EngineCore::retire(Operation& operation, Status status) {
  auto& slot = static_cast<OperationSlot&>(operation);
  const std::int64_t now = now_ns();
  if (status.is_ok()) {
    // With a peer its traffic counts it, and stats() adds that up.
    if (slot.traffic == nullptr) counters_.done.fetch_add(1, std::memory_order_relaxed);
  } else if (status.code() == Code::kCancelled) {
    counters_.cancelled.fetch_add(1, std::memory_order_relaxed);
  } else {
    count_failure(status);
  }
  if (slot.has_deadline) deadlines_.remove(slot);
  // Before the end is told: whoever hears of it may take the memory away.
  slot.pins.clear();
  if (slot.traffic != nullptr) {
    if (status.is_ok()) {
      const std::int64_t submitted = slot.state.submitted_ns();
      slot.traffic->count_done(slot.nbytes, slot.run_count, now - submitted,
                               slot.has_waited ? slot.posted_ns - submitted : 0);
    } else if (status.code() == Code::kCancelled) {
      slot.traffic->count_cancelled();
    } else {
      slot.traffic->count_failed();
    }
  }
  // Counted first: where none runs, all that ran are counted.
  counters_.running.fetch_sub(1, std::memory_order_seq_cst);
  if (trace_) trace(slot, status, now);
  slot.state.end(std::move(status), now);
  wake_for_room();
  release(operation);
}

void EngineCore::wake_for_room() {
  if (counters_.room_sleepers.load(std::memory_order_seq_cst) == 0) return;
  counters_.room_count.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(counters_.room_count, FutexScope::kPrivate);
}

void EngineCore::release(Operation& operation) {
  // In a forked child the pool's lock may be held by a thread that is not there.
  if (fork_guard_.is_forked_child()) return;
  if (operation.release()) operations_.give_back(static_cast<OperationSlot*>(&operation));
}

void EngineCore::stop(OperationSlot& slot, const Status& why) {
  slot.fail(why);
  if (slot.binding && slot.binding->withdraw(slot, why.code())) {
    retire(slot, why);
    return;
  }
  Channel* channel = slot.channel.load(std::memory_order_seq_cst);
  if (channel != nullptr && !slot.state.has_ended()) channel->abort(slot);
}

Status EngineCore::cancel(OperationSlot& slot, std::int64_t deadline_ns) {
  if (Status here = usable_here(); !here.is_ok()) return here;
  if (slot.state.has_ended()) return Status::ok();
  stop(slot, Status(Code::kCancelled, "the transfer was cancelled"));
  Waker waker;
  WakerWatch watch(waker);
  slot.state.watch(watch);
  while (!waker.has_fired()) {
    const std::int64_t left = deadline_ns - now_ns();
    if (left <= 0) break;
    waker.sleep(left);
  }
  slot.state.unwatch(watch);
  if (slot.state.has_ended()) return Status::ok();
  return Status(Code::kTimedOut, "the transfer has not come to rest yet; it is still running");
}

void EngineCore::watch_deadlines() {
  const std::int64_t next = deadlines_.next();
  if (next >= deadline_timer_ns_.load(std::memory_order_seq_cst)) return;
  deadline_timer_ns_.store(next, std::memory_order_seq_cst);
  loop_.run_at(next, [this] { expire_deadlines(); });
}

void EngineCore::expire_deadlines() {
  // First, so that whoever adds one from here on asks for a timer.
  deadline_timer_ns_.store(INT64_MAX, std::memory_order_seq_cst);
  for (OperationSlot* slot : deadlines_.take_due(now_ns())) {
    stop(*slot, deadline_passed());
    release(*slot);
  }
  watch_deadlines();
}

// --- Reaching peers (control thread) ---

void EngineCore::watch_listener(OwnedFd& listener, ControlSocket::Kind kind) {
  (void)loop_.watch(listener.get(), EPOLLIN,
                    [this, &listener, kind](std::uint32_t) { on_connection(listener, kind); });
}

void EngineCore::on_connection(OwnedFd& listener, ControlSocket::Kind kind) {
  for (int accepted = 0; accepted < 16; ++accepted) {
    Result<OwnedFd> socket = kind == ControlSocket::Kind::kTcp ? accept_tcp(listener.get())
                                                               : accept_from(listener.get());
    if (!socket.is_ok()) {
      // Mostly no descriptor is left. Those who wait stay in the queue; looking again at once would
      // burn a core.
      loop_.change(listener.get(), 0);
      loop_.run_at(now_ns() + kAcceptPauseNs, [this, &listener] {
        if (listener.is_valid()) loop_.change(listener.get(), EPOLLIN);
      });
      return;
    }
    if (!socket->is_valid()) return;
    // A flood of strangers does not take more than this many descriptors.
    std::vector<std::shared_ptr<Endpoint>> half_open;
    for (const auto& endpoint : endpoints_) {
      if (endpoint->is_server() && !endpoint->is_ready()) half_open.push_back(endpoint);
    }
    if (half_open.size() >= kMostHalfOpen) {
      half_open.front()->turn_away("too many connections to the engine '" + options_.name +
                                   "' are half open; try again");
    }
    auto endpoint = std::make_shared<Endpoint>(
        *this, now_ns() + static_cast<std::int64_t>(options_.connect_timeout_seconds * 1e9));
    endpoints_.push_back(endpoint);
    endpoint->accept(ControlSocket(kind, socket.take()));
    check_handshakes();
  }
}

void EngineCore::start_binding(std::shared_ptr<Binding> binding) {
  const HandleInfo& info = binding->info();
  {
    UniqueLock lock(mutex_);
    const auto lost = lost_peers_.find(info.incarnation);
    if (lost != lost_peers_.end() && now_ns() < lost->second.retry_ns) {
      const LostPeer known = lost->second;
      lock.unlock();
      const Status why = after_loss(info, known.why);
      for (OperationSlot* slot : binding->fail(why, known.retry_ns)) retire(*slot, why);
      return;
    }
  }
  // A connection that stands or is being made serves this grant too.
  for (const auto& endpoint : std::vector(endpoints_)) {
    if (endpoint->is_lost() || endpoint->peer_incarnation() != info.incarnation) continue;
    if (endpoint->is_server() && !endpoint->is_ready()) continue;
    endpoint->attach(std::move(binding));
    return;
  }
  auto endpoint = std::make_shared<Endpoint>(
      *this, now_ns() + static_cast<std::int64_t>(options_.connect_timeout_seconds * 1e9));
  endpoints_.push_back(endpoint);
  endpoint->connect(std::move(binding));
  check_handshakes();
}

void EngineCore::check_handshakes() {
  const std::int64_t now = now_ns();
  std::int64_t next = INT64_MAX;
  for (const auto& endpoint : std::vector(endpoints_)) {
    if (endpoint->is_ready() || endpoint->is_lost()) continue;
    if (endpoint->handshake_deadline_ns() <= now) {
      endpoint->lose(
          Status(Code::kTimedOut, "the peer did not finish the handshake within " +
                                      std::to_string(options_.connect_timeout_seconds) +
                                      " seconds; its process may be stopped, or is not kvzc"),
          PeerFate::kUnknown);
    } else {
      next = std::min(next, endpoint->handshake_deadline_ns());
    }
  }
  if (next == INT64_MAX || (handshake_check_ns_ > now && handshake_check_ns_ <= next)) return;
  handshake_check_ns_ = next;
  loop_.run_at(next, [this] { check_handshakes(); });
}

void EngineCore::endpoint_returned(Endpoint& endpoint) {
  if (!endpoint.is_remote()) return;
  // The peer's end of an old connection has died without our hearing of it.
  for (const auto& other : std::vector(endpoints_)) {
    if (other.get() == &endpoint || !other->is_remote() || !other->is_server()) continue;
    if (!other->is_ready() || other->peer_incarnation() != endpoint.peer_incarnation()) continue;
    other->lose(Status(Code::kPeerLost, "the peer has lost this connection and made another"),
                PeerFate::kUnknown);
  }
}

std::shared_ptr<PeerTraffic> EngineCore::traffic_of(const PeerInfo& peer, const char* transport) {
  const MutexLock lock(mutex_);
  if (const auto known = traffic_.find({peer.incarnation, transport}); known != traffic_.end()) {
    return known->second;
  }
  // Restarts make new peers without an end: those beyond these are counted together.
  const bool is_room = traffic_.size() < kMostCountedPeers;
  std::shared_ptr<PeerTraffic>& out =
      traffic_[{is_room ? peer.incarnation : Incarnation{}, transport}];
  if (!out) out = std::make_shared<PeerTraffic>(is_room ? peer : PeerInfo{}, transport);
  return out;
}

std::vector<PeerStats> EngineCore::peer_stats() const {
  std::vector<PeerStats> out;
  if (fork_guard_.is_forked_child()) return out;
  const MutexLock lock(mutex_);
  for (const auto& [key, traffic] : traffic_) {
    const bool is_connected =
        std::any_of(drained_->begin(), drained_->end(), [&, &key = key](const auto& endpoint) {
          return !endpoint->is_lost() && endpoint->peer_incarnation() == key.first;
        });
    PeerStats row{traffic->peer, traffic->transport, is_connected, traffic->put.read(),
                  traffic->get.read()};
    const auto is_used = [](const TrafficStats& way) {
      return way.done + way.failed + way.cancelled > 0;
    };
    if (traffic->is_first_choice.load() || is_used(row.put) || is_used(row.get)) out.push_back(std::move(row));
  }
  return out;
}

void EngineCore::trace(const OperationSlot& slot, const Status& status, std::int64_t done_ns) {
  const auto* const endpoint = static_cast<const Endpoint*>(slot.road.get());
  const bool is_put = slot.direction == Direction::kPut;
  const std::string lane = (is_put ? "put to " : "get from ") +
                           (endpoint != nullptr ? endpoint->info()->engine_name
                            : slot.binding      ? slot.binding->info().engine_name
                                                : "nobody");
  const char* const transport = slot.transport.load(std::memory_order_relaxed);
  trace_->add({lane, slot.label, transport != nullptr ? transport : "",
               status.is_ok() ? std::string_view() : code_name(status.code()), slot.nbytes,
               slot.run_count, slot.state.submitted_ns(), slot.posted_ns, done_ns});
}

void EngineCore::endpoint_ready(Endpoint& endpoint) {
  std::vector<std::shared_ptr<PeerTraffic>> traffic(transports_.size());
  for (std::size_t i = 0; i < transports_.size(); ++i) {
    if (endpoint.has_channel(i)) traffic[i] = traffic_of(*endpoint.info(), transports_[i]->name());
  }
  const auto first = std::find_if(traffic.begin(), traffic.end(),
                                  [](const auto& each) { return each != nullptr; });
  (*first)->is_first_choice.store(true);
  endpoint.count_in(std::move(traffic));
  {
    const MutexLock lock(mutex_);
    lost_peers_.erase(endpoint.peer_incarnation());
    auto list = std::make_shared<Endpoints>(*drained_);
    list->push_back(endpoint.shared_from_this());
    set_drained(std::move(list));
  }
  // It may have rung before anybody here knew of it.
  doorbell_.ring();
}

void EngineCore::endpoint_lost(Endpoint& endpoint,
                               std::span<const std::shared_ptr<Binding>> bindings, PeerFate fate) {
  const Status why = endpoint.why();
  const bool was_ready = endpoint.is_ready();
  // On one host a process that is gone stays gone. What is not reached over a network may be back
  // later; and where an engine has closed another may listen now, which says so.
  const bool may_return =
      (endpoint.is_remote() && (why.code() == Code::kPeerLost || why.code() == Code::kTimedOut)) ||
      (why.code() == Code::kStaleHandle && !endpoint.have_all_answered());
  const std::int64_t pause_ns = endpoint.has_peer_ended() ? kEndedPauseNs : kNetworkPauseNs;
  const std::int64_t retry_ns = may_return ? now_ns() + pause_ns : INT64_MAX;
  bool was_known = false;  // It was lost before, and was tried again.
  bool has_another = false;  // Both sides have connected at once, and the other connection stands.
  {
    const MutexLock lock(mutex_);
    auto list = std::make_shared<Endpoints>(*drained_);
    std::erase_if(*list, [&](const auto& each) { return each.get() == &endpoint; });
    has_another = was_ready && std::any_of(list->begin(), list->end(), [&](const auto& each) {
      return !each->is_lost() && each->peer_incarnation() == endpoint.peer_incarnation();
    });
    set_drained(std::move(list));
    if (was_ready && fate == PeerFate::kUnknown) doubtful_.push_back(endpoint.shared_from_this());
    // An incarnation that was reached and lost does not come back. Bounded, the table forgets
    // arbitrary ones: connecting to a lost peer fails anyway.
    // Who has not proved itself says nothing of the peer that it claims to be.
    const bool is_its_word = was_ready || !endpoint.is_server();
    if (has_another || !is_its_word) {
      // What is known of the peer stays.
    } else if (was_ready && !may_change(why.code()) &&
               !is_closed_.load(std::memory_order_acquire)) {
      if (lost_peers_.size() >= kMostLostPeers) lost_peers_.erase(lost_peers_.begin());
      lost_peers_.insert_or_assign(endpoint.peer_incarnation(),
                                   LostPeer{why, endpoint.has_peer_ended(), retry_ns});
    } else if (const auto lost = lost_peers_.find(endpoint.peer_incarnation());
               lost != lost_peers_.end() && !lost->second.is_final()) {
      was_known = true;
      // It was tried again. In vain: until the next time everybody hears so at once.
      if (may_return || why.code() == Code::kPeerLost || why.code() == Code::kTimedOut) {
        lost->second.retry_ns = now_ns() + kNetworkPauseNs;
      } else if (why.code() == Code::kStaleHandle) {
        lost->second = {why, true, INT64_MAX};
      } else {
        lost->second.retry_ns = 0;  // Somebody answers there.
      }
    }
  }
  std::erase_if(endpoints_, [&](const auto& each) { return each.get() == &endpoint; });
  // A peer that was never reached may be there next time.
  const bool may_be_there =
      may_change(why.code()) || (!was_ready && why.code() == Code::kPeerLost);
  const bool is_paused = may_return && (was_ready || was_known || why.code() == Code::kStaleHandle);
  const std::int64_t again_ns = has_another || (may_be_there && !is_paused) ? Binding::kAtOnce
                                : is_paused                                 ? retry_ns
                                                                            : Binding::kNever;
  for (const auto& binding : bindings) {
    for (OperationSlot* slot : binding->fail(why, again_ns)) retire(*slot, why);
  }
  // Those who wait for room at this peer, and those who wait for its tags.
  look_for_credits();
  doorbell_.ring();
}

void EngineCore::endpoint_gone(Endpoint& endpoint) {
  std::shared_ptr<Endpoint> keep = endpoint.shared_from_this();  // Let go of after the lock.
  const MutexLock lock(mutex_);
  std::erase(doubtful_, keep);
}

void EngineCore::binding_answered(Endpoint& endpoint, const std::shared_ptr<Binding>& binding,
                                  Status status,
                                  std::shared_ptr<const Binding::Resolved> resolved) {
  const std::shared_ptr<Endpoint> road = endpoint.shared_from_this();
  Channel* const channel = resolved ? resolved->channel : endpoint.tag_channel();
  std::vector<OperationSlot*> slots;
  if (status.is_ok()) {
    slots = binding->resolve(resolved);
  } else {
    // The grant is refused, the peer is not: it hears of what was to come.
    const std::int64_t again_ns =
        may_change(status.code()) ? Binding::kAtOnce : Binding::kNever;
    for (OperationSlot* slot : binding->fail(status, again_ns)) {
      if (slot->has_tag) {
        credit_waiters_.push_back({nullptr, {slot->tag, status.code()}, nullptr, road, channel});
      }
      retire(*slot, status);
    }
  }
  for (const Binding::Orphan& orphan : binding->take_orphans()) {
    credit_waiters_.push_back({nullptr, orphan, nullptr, road, channel});
  }
  for (OperationSlot* slot : slots) {
    credit_waiters_.push_back({slot, {}, resolved, road, channel});
  }
  look_for_credits();
}

bool EngineCore::try_again(CreditWaiter& waiter) {
  const auto has_sent = [&](const Tag& tag, Code code) {
    Status credit = waiter.channel->take_credit(tag.nbytes);
    if (credit.is_ok()) waiter.channel->send_tag(tag, code);
    return credit.code() != Code::kWouldBlock;
  };
  if (waiter.slot == nullptr) return has_sent(waiter.orphan.tag, waiter.orphan.code);
  OperationSlot& slot = *waiter.slot;
  slot.has_waited = true;
  Status status = slot.failure();
  // While it waited the engine or the region may have closed.
  if (status.is_ok() && is_closed_.load(std::memory_order_acquire)) status = closed();
  if (status.is_ok()) status = slot.binding->failure();
  if (status.is_ok()) status = dispatch(slot, *waiter.resolved);
  if (status.is_ok()) return true;
  if (status.code() == Code::kWouldBlock) return false;
  // It ends now; its tag tells the other side so, when there is room for it.
  waiter.orphan = {slot.tag, status.code()};
  const bool has_tag = slot.has_tag;
  waiter.slot = nullptr;
  retire(slot, std::move(status));
  return !has_tag || has_sent(waiter.orphan.tag, waiter.orphan.code);
}

// One timer for all of them, and one question per peer and look: many that wait for one slow peer
// must not keep this thread from the others.
void EngineCore::look_for_credits() {
  std::unordered_set<const Channel*> full;
  const std::size_t count = credit_waiters_.size();
  for (std::size_t i = 0; i < count; ++i) {
    CreditWaiter waiter = std::move(credit_waiters_.front());
    credit_waiters_.pop_front();
    const Channel* channel = waiter.channel;
    const bool may_end = waiter.slot != nullptr &&
                         (waiter.slot->has_failed() || is_closed_.load(std::memory_order_acquire) ||
                          !waiter.slot->binding->failure().is_ok());
    if ((full.contains(channel) && !may_end) || !try_again(waiter)) {
      full.insert(channel);
      credit_waiters_.push_back(std::move(waiter));
    }
  }
  if (credit_waiters_.empty()) {
    credit_pause_ns_ = 0;
    return;
  }
  const bool is_running = credit_pause_ns_ != 0;
  const bool has_progress = credit_waiters_.size() < count;
  credit_pause_ns_ = has_progress || !is_running
                         ? kCreditRetryNs
                         : std::min(2 * credit_pause_ns_, kMostCreditPauseNs);
  if (credit_timer_) return;
  credit_timer_ = true;
  loop_.run_at(now_ns() + credit_pause_ns_, [this] {
    credit_timer_ = false;
    look_for_credits();
  });
}

bool EngineCore::is_allowed(std::uint32_t uid) const {
  return uid == getuid() || std::find(options_.allowed_uids.begin(), options_.allowed_uids.end(),
                                      uid) != options_.allowed_uids.end();
}

void EngineCore::tick() {
  drain_all();
  Inbox::Credits credits;
  inbox_.expire(now_ns(), &credits);
  credits.settle();
  const double period = std::clamp(options_.arrival_ttl_seconds / 4, 0.05, 10.0);
  loop_.run_at(now_ns() + static_cast<std::int64_t>(period * 1e9), [this] { tick(); });
}

// --- Arrivals ---

std::shared_ptr<const EngineCore::Endpoints> EngineCore::drained() const {
  const MutexLock lock(mutex_);
  return drained_;
}

void EngineCore::set_drained(std::shared_ptr<const Endpoints> endpoints) {
  drained_ = std::move(endpoints);
  drained_version_.fetch_add(1, std::memory_order_release);
}

void EngineCore::drain_all() {
  const auto endpoints = drained();
  for (const auto& endpoint : *endpoints) endpoint->drain();
}

void EngineCore::arrived(std::uint64_t peer_token, std::string_view tag, Code code) {
  const auto& way = *reinterpret_cast<const Endpoint::Way*>(peer_token);
  Endpoint& endpoint = *way.endpoint;
  Inbox::Credits credits;
  inbox_.add(endpoint.info(), {endpoint.weak_from_this(), way.transport}, tag, code, now_ns(),
             &credits);
  if (credits.is_empty()) return;
  // A forgotten tag. The reference that is taken for it may be the last one, and must not go here: the
  // channel's thread holds locks that the end of the channel takes.
  std::shared_ptr<Endpoint> keep = endpoint.weak_from_this().lock();
  credits.settle();
  loop_.post([gone = std::move(keep)] {});
}

void EngineCore::channel_lost(std::uint64_t peer_token) {
  reinterpret_cast<const Endpoint::Way*>(peer_token)->endpoint->look_at_channels();
}

// While it lives somebody waits for the tag.
class EngineCore::Expectation {
 public:
  Expectation(EngineCore& core, std::string_view tag) : core_(core), tag_(tag) {
    core_.inbox_.begin_wait(tag_);
  }
  ~Expectation() {
    if (core_.is_forked_child()) return;
    core_.inbox_.end_wait(tag_);
    // What is left of it may be polled now, and whoever sleeps on the descriptor has not heard of it.
    if (core_.has_arrivals_fd_.load(std::memory_order_seq_cst) && core_.inbox_.has_pollable()) {
      core_.doorbell_.set_event();
    }
  }
  Expectation(const Expectation&) = delete;
  Expectation& operator=(const Expectation&) = delete;

 private:
  EngineCore& core_;
  const std::string_view tag_;
};

Result<std::vector<Arrival>> EngineCore::wait_arrivals(std::string_view tag, std::size_t count,
                                                       const PeerInfo* peer,
                                                       std::int64_t deadline_ns,
                                                       const std::function<bool()>& go_on) {
  if (count == 0) return std::vector<Arrival>();
  if (fork_guard_.is_forked_child()) return usable();
  const Expectation expectation(*this, tag);
  const auto look = [&]() -> Result<std::vector<Arrival>> {
    Inbox::Credits credits;
    std::vector<Arrival> taken = inbox_.take(tag, count, peer, &credits);
    credits.settle();
    return taken;
  };
  Result<std::vector<Arrival>> outcome = std::vector<Arrival>();
  WaitCount waits(counters_.arrival_wait_ns);
  const std::int64_t start = waits.since_ns();
  const std::int64_t spin_until = std::min(deadline_ns, start + arrival_patience_.ns());
  std::int64_t ask_ns = go_on ? start + kAskNs : INT64_MAX;
  bool has_slept = false;
  std::shared_ptr<const Endpoints> endpoints;
  std::uint64_t version = 0;
  for (;;) {
    // Read before looking: a ring after the look then ends the sleep at once.
    const std::uint32_t seen = doorbell_.count();
    Status lost = peer == nullptr ? Status::ok() : peer_status(*peer);
    // One that is connected later than this look rings when it has something.
    if (const std::uint64_t now = drained_version_.load(std::memory_order_acquire);
        !endpoints || now != version) {
      version = now;
      endpoints = drained();
    }
    for (const auto& endpoint : *endpoints) endpoint->drain();
    outcome = look();
    if (!outcome->empty()) {
      // When it came is as good as now, and has been looked up already.
      const std::int64_t came_ns = std::max(start, outcome->back().arrived_ns);
      arrival_patience_.came_after(came_ns - start);
      waits.end_at(came_ns);
      break;
    }
    if (!lost.is_ok()) {
      outcome = lost;
      break;
    }
    if (Status status = usable(); !status.is_ok()) {
      outcome = status;
      break;
    }
    const std::int64_t now = now_ns();
    const bool must_ask = now >= ask_ns;
    const bool is_given_up = must_ask && !go_on();
    // What it has called may have forked: the child has none of this.
    if (fork_guard_.is_forked_child()) return forked();
    if (must_ask) ask_ns = now + kAskNs;
    if (now >= deadline_ns || is_given_up) {
      outcome = Status(Code::kTimedOut, "the tag '" + std::string(tag) + "' did not arrive " +
                                            (count > 1 ? std::to_string(count) + " times " : "") +
                                            "in time");
      break;
    }
    // The clock is looked at now and then: it takes as long as what is waited for.
    for (int looks = 1; doorbell_.count() == seen; ++looks) {
      if (looks % 8 == 0 && now_ns() >= spin_until) break;
      cpu_relax();
      for (const auto& endpoint : *endpoints) endpoint->look();
    }
    if (doorbell_.count() != seen) continue;
    if (!std::exchange(has_slept, true)) arrival_patience_.was_in_vain();
    for (const auto& endpoint : *endpoints) endpoint->begin_rest();
    doorbell_.sleep(seen, std::min(deadline_ns, ask_ns) - now);
    for (const auto& endpoint : *endpoints) endpoint->end_rest();
  }
  return outcome;
}

std::vector<Arrival> EngineCore::poll_arrivals(std::size_t most) {
  if (!usable().is_ok()) return {};
  const bool is_armed = has_arrivals_fd_.load(std::memory_order_acquire);
  // Armed before looking, so that what comes after the look makes the descriptor readable.
  if (is_armed) {
    doorbell_.clear_event();
    doorbell_.arm_event();
  }
  drain_all();
  Inbox::Credits credits;
  std::vector<Arrival> out = inbox_.poll(most, &credits);
  credits.settle();
  if (is_armed && inbox_.has_pollable()) doorbell_.set_event();
  return out;
}

void EngineCore::forget_arrivals(std::string_view tag) {
  if (!usable().is_ok()) return;
  drain_all();
  Inbox::Credits credits;
  inbox_.forget(tag, now_ns(), &credits);
  credits.settle();
}

int EngineCore::arrivals_fd() {
  has_arrivals_fd_.store(true, std::memory_order_seq_cst);
  doorbell_.arm_event();
  drain_all();
  if (inbox_.has_pollable()) doorbell_.set_event();
  return doorbell_.event_fd();
}

Status EngineCore::peer_status(const PeerInfo& peer) {
  if (Status here = usable_here(); !here.is_ok()) return here;
  const MutexLock lock(mutex_);
  const auto found = lost_peers_.find(peer.incarnation);
  return found == lost_peers_.end() ? Status::ok() : found->second.why;
}

EngineStats EngineCore::stats() {
  EngineStats out;
  if (fork_guard_.is_forked_child()) return out;
  out.transfers_running = counters_.running.load();  // Before what they add to when they end.
  {
    const MutexLock lock(mutex_);
    out.regions = regions_.size();
    std::set<Incarnation> peers;  // Two connections to one are one.
    for (const auto& endpoint : *drained_) peers.insert(endpoint->peer_incarnation());
    out.peers = peers.size();
    for (const auto& [key, traffic] : traffic_) {
      for (const TrafficStats& way : {traffic->put.read(), traffic->get.read()}) {
        out.transfers_done += way.done;
        out.bytes_done += way.bytes;
        out.runs_done += way.runs;
        out.queue_ns += way.queue_ns;
      }
    }
  }
  {
    const MutexLock lock(quarantine_mutex_);
    for (const auto& region : quarantine_) {
      const MutexLock inner(region->mutex);
      for (const RegionRecord::Revoked& each : region->unfenced) {
        out.quarantined_bytes += each.nbytes;
      }
    }
  }
  out.storages = storages_.size();
  out.grants = grants_.size();
  out.transfers_done += counters_.done.load();
  const auto read = [](const std::atomic<std::int64_t>& ns) {
    return static_cast<std::uint64_t>(ns.load(std::memory_order_relaxed));
  };
  out.wait_ns = read(counters_.wait_ns);
  out.accept_wait_ns = read(counters_.accept_wait_ns);
  out.arrival_wait_ns = read(counters_.arrival_wait_ns);
  out.transfers_failed = counters_.failed.load();
  out.transfers_cancelled = counters_.cancelled.load();
  out.temporary_registrations = counters_.temporary.load();
  for (std::size_t i = 0; i < kCodeCount; ++i) out.failed_by_code[i] = failed_by_code_[i].load();
  const Inbox::Counts counts = inbox_.counts();
  out.arrivals_pending = counts.pending;
  out.arrivals_arrived = counts.arrived;
  out.arrivals_taken = counts.taken;
  out.arrivals_expired = counts.expired;
  out.arrivals_forgotten = counts.forgotten;
  return out;
}

}  // namespace kvzc

// Engines, and the module-level functions of the default one.

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <system_error>
#include <variant>

#include <pybind11/stl/filesystem.h>

#include "bindings.h"
#include "keywords.h"

namespace kvzc::bindings {
namespace {

// What the module owns: the allocator that all its engines share, its engines, the default one.
// Guarded by the GIL.
struct ModuleState {
  std::shared_ptr<SharedAllocator> allocator = std::make_shared<SharedAllocator>();
  std::vector<std::weak_ptr<Engine>> engines;
  std::shared_ptr<PyEngine> default_engine;
};

ModuleState& state() {
  // Never destroyed: objects that Python drops at its very end may still refer to it.
  static auto* const made = new ModuleState;
  return *made;
}

std::shared_ptr<PyEngine> make_engine(EngineOptions options, double default_timeout) {
  options.allocator = state().allocator;
  auto out = std::make_shared<PyEngine>();
  out->engine = take(Engine::create(std::move(options)));
  out->default_timeout = default_timeout;
  out->is_traced = out->engine->is_traced();
  auto& engines = state().engines;
  std::erase_if(engines, [](const auto& each) { return each.expired(); });
  engines.push_back(out->engine);
  return out;
}

std::uint32_t user_id(py::handle user) {
  if (!py::isinstance<py::str>(user)) return user.cast<std::uint32_t>();
  try {
    return py::module_::import("pwd").attr("getpwnam")(user).attr("pw_uid").cast<std::uint32_t>();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_KeyError)) throw;
    throw py::value_error("allow_users: there is no user '" + user.cast<std::string>() + "'");
  }
}

using Shape = py::typing::Union<py::int_, py::typing::Tuple<py::int_, py::ellipsis>>;
using Users = py::typing::Iterable<py::typing::Union<py::str, py::int_>>;

PyPeer connect(const std::shared_ptr<PyEngine>& owner, const RemoteView& target,
               const std::optional<double>& timeout) {
  const std::int64_t deadline = deadline_of(timeout, owner->default_timeout);
  const Transfer transfer = take(owner->engine->connect(target));
  wait_transfers({&transfer, 1}, WaitFor::kAll, deadline);
  check(transfer.status());
  return PyPeer{owner, take(owner->engine->peer_of(target))};
}

std::string explain(const std::shared_ptr<PyEngine>& owner, const RemoteView& target,
                    const std::optional<double>& timeout) {
  (void)connect(owner, target, timeout);
  return take(owner->engine->explain(target));
}

py::typing::Dict<py::str, py::int_> stats_dict(const EngineStats& stats) {
  py::typing::Dict<py::str, py::int_> out;
  out["regions"] = stats.regions;
  out["storages"] = stats.storages;
  out["grants"] = stats.grants;
  out["peers"] = stats.peers;
  out["transfers_running"] = stats.transfers_running;
  out["transfers_done"] = stats.transfers_done;
  out["transfers_failed"] = stats.transfers_failed;
  out["transfers_cancelled"] = stats.transfers_cancelled;
  out["bytes_done"] = stats.bytes_done;
  out["runs_done"] = stats.runs_done;
  out["temporary_registrations"] = stats.temporary_registrations;
  out["arrivals_pending"] = stats.arrivals_pending;
  out["arrivals_arrived"] = stats.arrivals_arrived;
  out["arrivals_taken"] = stats.arrivals_taken;
  out["arrivals_expired"] = stats.arrivals_expired;
  out["arrivals_forgotten"] = stats.arrivals_forgotten;
  out["queue_ns"] = stats.queue_ns;
  out["wait_ns"] = stats.wait_ns;
  out["accept_wait_ns"] = stats.accept_wait_ns;
  out["arrival_wait_ns"] = stats.arrival_wait_ns;
  out["quarantined_bytes"] = stats.quarantined_bytes;
  for (std::size_t code = 1; code < kCodeCount; ++code) {
    const std::string name(code_name(static_cast<Code>(code)));
    if (static_cast<Code>(code) != Code::kCancelled) {
      out[py::str("transfers_failed_" + name)] = stats.failed_by_code[code];
    }
  }
  return out;
}

// [(least, count)] of the buckets that hold something.
py::typing::List<py::typing::Tuple<py::int_, py::int_>> buckets(const Log2Histogram& histogram) {
  py::typing::List<py::typing::Tuple<py::int_, py::int_>> out;
  for (std::size_t i = 0; i < histogram.size(); ++i) {
    if (histogram[i] == 0) continue;
    const std::uint64_t least = i == 0 ? 0 : std::uint64_t{1} << (i - 1);
    out.append(py::make_tuple(least, histogram[i]));
  }
  return out;
}

py::dict traffic_dict(const TrafficStats& traffic) {
  py::dict out;
  out["done"] = traffic.done;
  out["failed"] = traffic.failed;
  out["cancelled"] = traffic.cancelled;
  out["bytes"] = traffic.bytes;
  out["runs"] = traffic.runs;
  out["ns"] = traffic.ns;
  out["queue_ns"] = traffic.queue_ns;
  out["by_bytes"] = buckets(traffic.by_bytes);
  out["by_ns"] = buckets(traffic.by_ns);
  return out;
}

py::typing::List<py::typing::Dict<py::str, py::object>> peer_stats(const PyEngine& self) {
  py::typing::List<py::typing::Dict<py::str, py::object>> out;
  for (const PeerStats& each : self.engine->peer_stats()) {
    py::dict peer;
    peer["name"] = each.peer.engine_name;
    peer["incarnation"] = incarnation_text(each.peer.incarnation);
    peer["transport"] = each.transport;
    peer["connected"] = each.is_connected;
    peer["put"] = traffic_dict(each.put);
    peer["get"] = traffic_dict(each.get);
    out.append(peer);
  }
  return out;
}

void close_engine(Engine& engine, std::int64_t deadline_ns) {
  if (!engine.usable().is_ok()) return;
  // On a thread of its own, so that this one sees Ctrl-C: then the close is hurried, not left.
  std::future<Status> closed;
  try {
    closed = std::async(std::launch::async, [&] { return engine.close(deadline_ns); });
  } catch (const std::system_error&) {
    const GilRelease release;  // No thread is left; it has to do without.
    closed = std::async(std::launch::deferred, [&] { return engine.close(deadline_ns); });
    closed.wait();
  }
  Status status;
  const auto look = [&](std::int64_t) {
    if (closed.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
      return Status(Code::kWouldBlock, "closing");
    }
    status = closed.get();
    return Status::ok();
  };
  try {
    (void)wait_in_slices(INT64_MAX, look);
  } catch (py::error_already_set&) {
    const GilRelease release;
    (void)engine.close(0);
    throw;
  }
  release_waiting_objects();
  check(status);
}

// At interpreter exit: threads end and blocked waits wake before the interpreter goes. Only daemon
// threads are left then, and these do not come back to a dying interpreter.
void close_all() {
  const std::int64_t deadline = deadline_of(1.0, 1.0);
  for (const auto& weak : std::exchange(state().engines, {})) {
    const std::shared_ptr<Engine> engine = weak.lock();
    if (!engine) continue;
    const GilRelease release;
    (void)engine->close(deadline);
  }
  end_of_interpreter();
  release_waiting_objects();
}

constexpr const char* kPutDoc =
    "Writes `source` into the memory behind `target`; the other side's program takes no part.\n\n"
    "source: a Region or LocalView, or what register() takes, also read-only. It may be reused\n"
    "    once the transfer is done, and is kept alive until then. It need not be registered;\n"
    "    memory outside every region is counted in stats()['temporary_registrations'].\n"
    "target: a RemoteHandle or a part of one, of equal shape and dtype.\n"
    "after: what the source must wait for on its device, or kvzc.NOW; nothing on CPU memory.\n"
    "notify: a tag of up to 240 bytes that arrives at the target's engine after every byte.\n"
    "label: any object; comes back as Transfer.label, also from a queue.\n"
    "deadline: seconds from now after which the transfer is cancelled by itself.\n"
    "accept_timeout: seconds to wait while queues or the target's inbox are full; 0 raises\n"
    "    WouldBlock instead, with nothing posted. Default: the engine's default_timeout.\n"
    "queue: a CompletionQueue that gives the transfer back when it has ended.\n\n"
    "Returns a Transfer. Raises LayoutMismatch, InvalidArgument (overlapping targets), PeerLost,\n"
    "StaleHandle, Revoked, AccessDenied, WouldBlock, TimedOut, Closed. What is only known once "
    "the\n"
    "peer is reached is raised by Transfer.wait().";

constexpr const char* kPutManyDoc =
    "Writes several (source, target) pairs as one transfer, with one notify after all bytes.\n"
    "All targets come from one handle, and no byte may be in two of them. Otherwise as put().";

constexpr const char* kGetDoc =
    "Reads the memory behind `source` into `target`; the other side's program takes no part.\n\n"
    "target: a Region or LocalView, or what register() takes. It is kept alive until the transfer\n"
    "    ends, and holds the bytes once that is done.\n"
    "source: a RemoteHandle or a part of one, of equal shape and dtype, granted for 'get'.\n"
    "notify: a tag that arrives at the source's engine after the last byte was read.\n\n"
    "Everything else as in put().";

constexpr const char* kGetManyDoc =
    "Reads several (target, source) pairs as one transfer, with one notify after all bytes.\n"
    "All sources come from one handle, and no byte may be in two targets. Otherwise as get().";

constexpr const char* kNotifyDoc =
    "Sends a tag of up to 240 bytes without data, to the engine behind a handle or to a Peer.\n\n"
    "Returns a Transfer. Raises PeerLost, StaleHandle, Revoked, WouldBlock, TimedOut, Closed.";

constexpr const char* kRegisterDoc =
    "Registers memory, so that peers can be given handles to it.\n\n"
    "obj: a torch CPU tensor, a NumPy array, a CPU tensor of any library that has DLPack, a\n"
    "    writable buffer, or a dict of names to such: one group with one handle. A non-contiguous\n"
    "    tensor keeps its shape and strides. The objects are kept alive until the region is closed;\n"
    "    a storage that is registered twice is registered once.\n\n"
    "dtypes: those of torch and NumPy, ml_dtypes' bfloat16 and float8 (the same names, the same\n"
    "types). NumPy's structured types, strings and times move as their bytes: both sides need the\n"
    "same dtype, names and offsets of fields included.\n\n"
    "Returns a Region. Raises InvalidArgument (empty, read-only, meta), Unsupported (dtype, "
    "device,\n"
    "layout), LimitExceeded, Closed.";

constexpr const char* kEmptyDoc =
    "Allocates memory that other processes on this host can map: the target of fast puts.\n\n"
    "shape: an int or a tuple of ints. dtype: a torch dtype gives a torch tensor, a NumPy dtype "
    "or\n"
    "its name a NumPy array. The memory is a sealed memfd, zeroed, and allocated at once, so that\n"
    "a shortage is an error here and never a SIGBUS later.\n\n"
    "Raises LimitExceeded with the limit and the remedy, InvalidArgument for 0 bytes.";

constexpr const char* kConnectDoc =
    "Reaches the engine behind a handle and fetches what puts through it need.\n\n"
    "A put does this by itself, without blocking; connecting before spares the first put the "
    "wait.\n"
    "Returns the Peer. Raises PeerLost, StaleHandle, Revoked, AccessDenied, BadHandle, TimedOut.";

constexpr const char* kExplainDoc =
    "Says in words which transport carries transfers through a handle, which way the bytes go, and\n"
    "why no better transport does. Reaches the peer first, as connect() does.\n\n"
    "Raises PeerLost, StaleHandle, Revoked, AccessDenied, BadHandle, TimedOut.";

constexpr const char* kEngineDoc =
    "One participant: it owns registrations, transports, threads and the roads to its peers.\n\n"
    "name: others see it in errors and handles; unique on this host. Default: a random one.\n"
    "transports: names to use, for example ['shm']; default: all that this machine can run.\n"
    "default_timeout: seconds, wherever a timeout is left out.\n"
    "strict: refuse sources outside every region, instead of registering them for one transfer.\n"
    "arrival_ttl: seconds until a tag that nobody takes is dropped.\n"
    "arrival_depth: tags of one peer that may be untaken here before its puts are pushed back.\n"
    "allow_users: user names or ids that may connect besides this process's own.\n"
    "copy_threads: threads for large copies; 0 chooses by the number of cores.\n"
    "max_transfers: transfers that may run at once before put() pushes back.\n"
    "max_grants: handles that may be alive at once.\n"
    "connect_timeout: seconds for one attempt to reach a peer.\n"
    "listen: \"host:port\" at which engines on other hosts reach this one, for example\n"
    "    \"0.0.0.0:7000\"; port 0: any that is free. Default: none, no port is open.\n"
    "advertise: \"host:port\" that handles name instead, where others see another address (NAT).\n"
    "secret: bytes or str, 16 or more, that all engines which may meet over a network share. Both\n"
    "    sides prove that they know it; it never travels. It keeps strangers out, and does not\n"
    "    encrypt: the network itself is trusted.\n"
    "peer_timeout: whole seconds, 2 or more, after which a host that answers nothing is lost. A\n"
    "    process that is only busy or stopped still answers: its kernel does.\n"
    "rdma: an Rdma, to choose RDMA devices and how they are used.\n"
    "trace: a file that is appended what transfers did when, for Perfetto (ui.perfetto.dev): a lane\n"
    "    per peer and direction, time in queues and in copies apart. Engines and processes may share\n"
    "    one. Default: the environment variable KVZC_TRACE, if that is set.\n"
    "faults: a Faults, to make trouble on demand in tests.";

// The keyword arguments that every put and get has.
auto transfer_keywords() {
  return std::tuple(py::arg("after") = py::none(), py::arg("notify") = py::none(),
                    py::arg("label") = py::none(), py::arg("deadline") = py::none(),
                    py::arg("accept_timeout") = py::none(), py::arg("queue") = py::none());
}

using Tag = std::optional<py::bytes>;
using Seconds = std::optional<double>;
using Owner = std::shared_ptr<PyEngine>;

// Of one local and one remote view; which of them is the source says the direction.
template <Direction direction>
PyTransferPointer move_one(const Owner& self, const py::object& local, const RemoteView& remote,
                           const py::object& after, const Tag& notify, const py::object& label,
                           const Seconds& deadline, const Seconds& accept_timeout,
                           const Queue& queue) {
  return transfer(self, direction, local, remote,
                  {after, notify, label, deadline, accept_timeout, queue.value_or(nullptr)});
}

template <Direction direction>
PyTransferPointer move_many(const Owner& self, const Pairs& pairs, const py::object& after,
                            const Tag& notify, const py::object& label, const Seconds& deadline,
                            const Seconds& accept_timeout, const Queue& queue) {
  return transfer_many(self, direction, pairs,
                       {after, notify, label, deadline, accept_timeout, queue.value_or(nullptr)});
}

// The same from the default engine.
template <Direction direction>
PyTransferPointer move_here(const py::object& local, const RemoteView& remote,
                            const py::object& after, const Tag& notify, const py::object& label,
                            const Seconds& deadline, const Seconds& accept_timeout,
                            const Queue& queue) {
  return move_one<direction>(default_engine(), local, remote, after, notify, label, deadline,
                             accept_timeout, queue);
}

template <Direction direction>
PyTransferPointer move_many_here(const Pairs& pairs, const py::object& after, const Tag& notify,
                                 const py::object& label, const Seconds& deadline,
                                 const Seconds& accept_timeout, const Queue& queue) {
  return move_many<direction>(default_engine(), pairs, after, notify, label, deadline,
                              accept_timeout, queue);
}

void bind_moves(py::class_<PyEngine, Owner> engine) {
  define_quick(engine, "put", &move_one<Direction::kPut>, kPutDoc,
               std::tuple(py::arg("source"), py::arg("target")), transfer_keywords());
  define_quick(engine, "get", &move_one<Direction::kGet>, kGetDoc,
               std::tuple(py::arg("target"), py::arg("source")), transfer_keywords());
  define_quick(engine, "put_many", &move_many<Direction::kPut>, kPutManyDoc,
               std::tuple(py::arg("pairs")), transfer_keywords());
  define_quick(engine, "get_many", &move_many<Direction::kGet>, kGetManyDoc,
               std::tuple(py::arg("pairs")), transfer_keywords());
}

void bind_default_engine(py::module_& module) {
  module.def("default_engine", &default_engine,
             "The engine that the module-level functions act on, made at first use.");
  module.def(
      "register", [](const py::object& obj) { return register_object(default_engine(), obj); },
      py::arg("obj"), kRegisterDoc);
  module.def(
      "empty",
      [](const Shape& shape, const py::object& dtype, const std::string& device) {
        return make_empty(*state().allocator, shape, dtype, device);
      },
      py::arg("shape"), py::arg("dtype"), py::arg("device") = "cpu", kEmptyDoc);
  define_quick(module, "put", &move_here<Direction::kPut>, kPutDoc, std::tuple(py::arg("source"), py::arg("target")), transfer_keywords());
  define_quick(module, "get", &move_here<Direction::kGet>, kGetDoc, std::tuple(py::arg("target"), py::arg("source")), transfer_keywords());
  define_quick(module, "put_many", &move_many_here<Direction::kPut>, kPutManyDoc, std::tuple(py::arg("pairs")),
               transfer_keywords());
  define_quick(module, "get_many", &move_many_here<Direction::kGet>, kGetManyDoc, std::tuple(py::arg("pairs")),
               transfer_keywords());
  module.def(
      "connect",
      [](const RemoteView& handle, const std::optional<double>& timeout) {
        return connect(default_engine(), handle, timeout);
      },
      py::arg("handle"), py::arg("timeout") = py::none(), kConnectDoc);
  module.def(
      "explain",
      [](const RemoteView& handle, const std::optional<double>& timeout) {
        return explain(default_engine(), handle, timeout);
      },
      py::arg("handle"), py::arg("timeout") = py::none(), kExplainDoc);
  module.def(
      "_is_sharable",
      [](std::uintptr_t address, std::uint64_t nbytes) {
        return state().allocator->find(reinterpret_cast<const std::byte*>(address), nbytes) !=
               nullptr;
      },
      py::arg("address"), py::arg("nbytes"),
      "Whether these bytes lie in memory that other processes can map.");
  module.def("_close_all", &close_all, "Closes every engine of this process, in a second at most.");
}

}  // namespace

std::shared_ptr<PyEngine> default_engine() {
  std::shared_ptr<PyEngine>& engine = state().default_engine;
  if (!engine || engine->engine->usable().code() == Code::kClosed) {
    engine = make_engine({}, kDefaultTimeoutSeconds);
  }
  return engine;
}

namespace {

constexpr const char* kFaultsDoc =
    "Trouble on demand, for tests of programs that must live with it: Engine(faults=Faults(...)).\n\n"
    "What kvzc promises stays promised: a notify never overtakes its data, a transfer ends once,\n"
    "and not one byte moves after the end. Chances are 0 to 1, drawn from one seeded sequence.\n\n"
    "seed: of the random numbers.\n"
    "stripe_bytes: transfers are cut into stripes of at most this size, which travel apart; 0: not.\n"
    "delay: stripes, ends and tags are held back for a random time up to this, in seconds.\n"
    "reorder: stripes begin in random order.\n"
    "post_failure: chance that a transfer fails at once (SystemFailure) with nothing moved.\n"
    "stripe_failure: chance that it fails after some of its stripes have moved.\n"
    "completion_loss: chance that its end is never told: it runs until it is cancelled, its\n"
    "    deadline passes, or the peer is lost.\n"
    "vanish_after: after this many transfers to a peer, that peer falls silent; 0: never.\n"
    "detection: seconds until a silent peer is reported lost; math.inf: never.";

void bind_faults(py::module_& module) {
  py::class_<FaultOptions>(module, "Faults", kFaultsDoc)
      .def(py::init([](std::uint64_t seed, std::uint64_t stripe_bytes, double delay, bool reorder,
                       double post_failure, double stripe_failure, double completion_loss,
                       std::uint64_t vanish_after, double detection) {
             for (const double chance : {post_failure, stripe_failure, completion_loss}) {
               if (!(chance >= 0 && chance <= 1)) throw py::value_error("a chance is 0 to 1");
             }
             if (!(delay >= 0 && delay < 3600) || !(detection >= 0)) {
               throw py::value_error("delay and detection are seconds, 0 or more");
             }
             FaultOptions options;
             options.seed = seed;
             options.stripe_bytes = stripe_bytes;
             options.most_delay_seconds = delay;
             options.reorder = reorder;
             options.post_failure = post_failure;
             options.stripe_failure = stripe_failure;
             options.completion_loss = completion_loss;
             options.vanish_after_posts = vanish_after;
             options.detection_seconds = detection;
             return options;
           }),
           py::kw_only(), py::arg("seed") = 1, py::arg("stripe_bytes") = 0, py::arg("delay") = 0.0,
           py::arg("reorder") = false, py::arg("post_failure") = 0.0,
           py::arg("stripe_failure") = 0.0, py::arg("completion_loss") = 0.0,
           py::arg("vanish_after") = 0, py::arg("detection") = 1.0)
      .def("__repr__", [](const FaultOptions& self) {
        return "<kvzc.Faults seed=" + std::to_string(self.seed) + ">";
      });
}

constexpr const char* kRdmaDoc =
    "How RDMA devices are used: Engine(rdma=Rdma(devices=[\"mlx5_0\", \"mlx5_1\"])).\n\n"
    "devices: names, as `ibv_devices` lists them. Each is a rail: the first here goes to the first\n"
    "    of the peer, and so on. None: every device with an active port.\n"
    "gid_index: the address to use, as `kvzc info` lists them; None chooses: RoCE v2, IPv4, the one\n"
    "    that is nearest to the peer's.\n"
    "traffic_class, service_level: 0 to 255 and 0 to 15, as the network's operator says (PFC, ECN).\n"
    "ack_timeout: a packet is sent again after 4.096 microseconds times 2 to the power of this\n"
    "    (1 to 31), and `retries` times (0 to 7), before the peer's port counts as gone.\n"
    "queue_depth: work requests under way per peer and device, 64 to 8192.\n"
    "request_bytes: a longer run of bytes is cut into requests of this size.\n"
    "outstanding_bytes: bytes under way per peer and device; a cancel waits for these.\n"
    "stripe_bytes: transfers from this size on go over all rails at once.\n"
    "always_flush: read back after each write, even where the peer's device acknowledges only what\n"
    "    is visible.\n\n"
    "Raises ValueError for what is out of range.";

void bind_rdma(py::module_& module) {
  py::class_<RdmaOptions>(module, "Rdma", kRdmaDoc)
      .def(py::init([](const std::optional<std::vector<std::string>>& devices,
                       const std::optional<int>& gid_index, int traffic_class, int service_level,
                       int ack_timeout, int retries, std::uint32_t queue_depth,
                       std::uint64_t request_bytes, std::uint64_t outstanding_bytes,
                       std::uint64_t stripe_bytes, bool always_flush) {
             const auto within = [](const char* name, std::int64_t value, std::int64_t least,
                                    std::int64_t most) {
               if (value >= least && value <= most) return;
               throw py::value_error(std::string(name) + " is " + std::to_string(value) +
                                     "; it must be " + std::to_string(least) + " to " +
                                     std::to_string(most));
             };
             if (devices && devices->empty()) {
               throw py::value_error("devices=[] leaves none; omit it for all that are active");
             }
             within("gid_index", gid_index.value_or(0), 0, 255);
             within("traffic_class", traffic_class, 0, 255);
             within("service_level", service_level, 0, 15);
             within("ack_timeout", ack_timeout, 1, 31);
             within("retries", retries, 0, 7);
             within("queue_depth", queue_depth, 64, 8192);
             constexpr std::int64_t kGib = std::int64_t{1} << 30;
             within("request_bytes", static_cast<std::int64_t>(request_bytes), 256, kGib);
             within("outstanding_bytes", static_cast<std::int64_t>(outstanding_bytes), 256, kGib);
             RdmaOptions options;
             options.devices = devices.value_or(std::vector<std::string>());
             options.gid_index = gid_index.value_or(-1);
             options.traffic_class = static_cast<std::uint8_t>(traffic_class);
             options.service_level = static_cast<std::uint8_t>(service_level);
             options.ack_timeout = static_cast<std::uint8_t>(ack_timeout);
             options.retries = static_cast<std::uint8_t>(retries);
             options.queue_depth = queue_depth;
             options.most_request_bytes = request_bytes;
             options.most_outstanding_bytes = outstanding_bytes;
             options.least_striped_bytes = stripe_bytes;
             options.always_flush = always_flush;
             return options;
           }),
           py::kw_only(), py::arg("devices") = py::none(), py::arg("gid_index") = py::none(),
           py::arg("traffic_class") = 0, py::arg("service_level") = 0, py::arg("ack_timeout") = 14,
           py::arg("retries") = 7, py::arg("queue_depth") = 256,
           py::arg("request_bytes") = 1u << 20, py::arg("outstanding_bytes") = 8u << 20,
           py::arg("stripe_bytes") = 256u << 10, py::arg("always_flush") = false)
      .def("__repr__", [](const RdmaOptions& self) {
        std::string names;
        for (const std::string& name : self.devices) names += " " + name;
        return "<kvzc.Rdma" + (names.empty() ? " all devices" : names) + ">";
      });
}

}  // namespace

void declare_engine(py::module_& module) {
  py::class_<PyEngine, std::shared_ptr<PyEngine>>(module, "Engine", kEngineDoc);
}

void bind_engine(py::module_& module) {
  bind_faults(module);
  bind_rdma(module);
  py::reinterpret_borrow<py::class_<PyEngine, std::shared_ptr<PyEngine>>>(module.attr("Engine"))
      .def(py::init([](const std::optional<std::string>& name,
                       const std::optional<std::vector<std::string>>& transports,
                       double default_timeout, bool strict, double arrival_ttl,
                       std::uint32_t arrival_depth, const Users& allow_users,
                       std::uint32_t copy_threads, std::uint32_t max_transfers,
                       std::uint32_t max_grants, double connect_timeout,
                       const std::optional<std::string>& listen,
                       const std::optional<std::string>& advertise,
                       const std::optional<std::variant<py::bytes, std::string>>& secret,
                       int peer_timeout, const std::optional<RdmaOptions>& rdma,
                       const std::optional<std::filesystem::path>& trace,
                       const std::optional<FaultOptions>& faults) {
             EngineOptions options;
             options.name = name.value_or("");
             options.transports = transports.value_or(std::vector<std::string>());
             if (transports && transports->empty()) {
               throw py::value_error("transports=[] leaves none; omit it for all there are");
             }
             check_timeout(default_timeout);
             if (!(arrival_ttl > 0) || !(connect_timeout > 0)) {
               throw py::value_error("arrival_ttl and connect_timeout are seconds, more than 0");
             }
             if (arrival_depth == 0) throw py::value_error("arrival_depth is at least 1");
             options.strict = strict;
             options.faults = faults;
             options.rdma = rdma.value_or(RdmaOptions());
             if (trace) options.trace = trace->string();
             options.arrival_ttl_seconds = arrival_ttl;
             options.connect_timeout_seconds = std::min(connect_timeout, 1e9);
             options.listen = listen.value_or("");
             options.advertise = advertise.value_or("");
             if (secret) {
               options.secret = std::visit([](const auto& text) { return std::string(text); }, *secret);
               if (options.secret.empty()) throw py::value_error("secret is empty; omit it for none");
             }
             options.peer_timeout_seconds = peer_timeout;
             options.max_transfers = max_transfers;
             options.max_grants = max_grants;
             options.tuning.copy_threads = copy_threads;
             options.tuning.arrival_depth = arrival_depth;
             for (const py::handle user : allow_users) {
               options.allowed_uids.push_back(user_id(user));
             }
             return make_engine(std::move(options), default_timeout);
           }),
           py::arg("name") = py::none(), py::kw_only(), py::arg("transports") = py::none(),
           py::arg("default_timeout") = kDefaultTimeoutSeconds, py::arg("strict") = false,
           py::arg("arrival_ttl") = 300.0, py::arg("arrival_depth") = 65536,
           py::arg("allow_users") = py::tuple(), py::arg("copy_threads") = 0,
           py::arg("max_transfers") = 16384, py::arg("max_grants") = 131072,
           py::arg("connect_timeout") = 10.0, py::arg("listen") = py::none(),
           py::arg("advertise") = py::none(), py::arg("secret") = py::none(),
           py::arg("peer_timeout") = 5, py::arg("rdma") = py::none(),
           py::arg("trace") = py::none(), py::arg("faults") = py::none())
      .def_property_readonly(
          "name", [](const PyEngine& self) { return self.engine->name(); },
          "Its name, given or random.")
      .def_property_readonly(
          "incarnation",
          [](const PyEngine& self) { return incarnation_text(self.engine->incarnation()); },
          "Random per start, as 32 hexadecimal digits.")
      .def_property_readonly(
          "addresses", [](const PyEngine& self) { return self.engine->addresses(); },
          "Where engines on other hosts reach it, \"host:port\" each, as its handles say; [] when it\n"
          "does not listen.")
      .def_property_readonly(
          "closed",
          [](const PyEngine& self) { return self.engine->usable().code() == Code::kClosed; },
          "Whether close() was called.")
      .def_readonly("default_timeout", &PyEngine::default_timeout, "Seconds.")
      .def_property_readonly(
          "arrivals", [](const std::shared_ptr<PyEngine>& self) { return PyArrivals{self}; },
          "The tags that peers have sent to this engine.")
      .def("register", &register_object, py::arg("obj"), kRegisterDoc)
      .def(
          "empty",
          [](const PyEngine& self, const Shape& shape, const py::object& dtype,
             const std::string& device) {
            return make_empty(self.engine->allocator(), shape, dtype, device);
          },
          py::arg("shape"), py::arg("dtype"), py::arg("device") = "cpu", kEmptyDoc)
      .def(
          "notify",
          [](const std::shared_ptr<PyEngine>& self,
             const std::variant<PyPeer, RemoteView>& target, const py::bytes& tag, const Seconds& deadline,
             const Seconds& accept_timeout) {
            const py::none nothing;
            const Tag sent(tag);
            const TransferArguments arguments{nothing, sent, nothing, deadline, accept_timeout};
            if (const auto* peer = std::get_if<PyPeer>(&target)) {
              return notify(self, *peer->info, arguments);
            }
            return notify(self, std::get<RemoteView>(target), arguments);
          },
          py::arg("target"), py::arg("tag"), py::kw_only(), py::arg("deadline") = py::none(),
          py::arg("accept_timeout") = py::none(), kNotifyDoc)
      .def("connect", &connect, py::arg("handle"), py::arg("timeout") = py::none(), kConnectDoc)
      .def("explain", &explain, py::arg("handle"), py::arg("timeout") = py::none(), kExplainDoc)
      .def(
          "stats", [](const PyEngine& self) { return stats_dict(self.engine->stats()); },
          "A snapshot of the engine's counters. Nanoseconds: 'queue_ns', from acceptance until the\n"
          "transport was asked, of all transfers that are done; 'wait_ns', 'arrival_wait_ns' and\n"
          "'accept_wait_ns', what the program's threads have waited for transfers (beyond a first look\n"
          "at each, and what they copied themselves), for tags, and to have a transfer accepted.")
      .def("peer_stats", &peer_stats,
           "What has moved to and from each peer that was ever connected: a list of dicts, one per peer\n"
           "and transport, with its name, incarnation and transport, whether it is connected, and for\n"
           "'put' and 'get' the transfers done, failed and cancelled; of those done the bytes, the runs,\n"
           "'ns' from acceptance to the end (of those up to 1 KiB every sixteenth is timed and stands for the\n"
           "others) and 'queue_ns' of it until the transport was asked; and\n"
           "histograms [(least, count)] by powers of two, 'by_bytes' and 'by_ns'. Beyond 1,024 of them\n"
           "the rest is counted together, under an empty name.")
      .def(
          "close",
          [](const PyEngine& self, const std::optional<double>& timeout) {
            close_engine(*self.engine, deadline_of(timeout, self.default_timeout));
          },
          py::arg("timeout") = py::none(),
          "Ends everything: transfers, handles, peers, threads. Idempotent. Raises TimedOut when\n"
          "something did not come to rest in time; everything is closed all the same.")
      .def("__enter__", [](std::shared_ptr<PyEngine> self) { return self; })
      .def(
          "__exit__",
          [](const py::object& self, const py::object&, const py::object&, const py::object&) {
            self.attr("close")();
          },
          py::arg("type"), py::arg("value"), py::arg("traceback"))
      .def("__reduce__",
           [](const PyEngine&) -> py::object {
             throw py::type_error(
                 "an engine belongs to its process and is not pickled; make one in each process");
           })
      .def("__repr__", [](const PyEngine& self) {
        return "<kvzc.Engine '" + self.engine->name() + "'" +
               (self.engine->usable().is_ok() ? ">" : ", closed>");
      });
  bind_moves(module.attr("Engine"));
  bind_default_engine(module);
}

}  // namespace kvzc::bindings

// Starting transfers, and waiting for them.

#include <algorithm>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

// Up to this a put keeps the GIL: letting it go and taking it back would cost more than the copy.
constexpr std::uint64_t kQuickBytes = 16 << 10;

// Marks "do not wait for the source's device".
struct Now {};

std::uint64_t after_token(py::handle after) {
  if (after.is_none()) return 0;
  if (py::isinstance<Now>(after)) return 1;
  const auto is_waitable = [](py::handle each) { return py::hasattr(each, "query"); };
  bool is_right = is_waitable(after);
  if (PyList_Check(after.ptr()) != 0) {
    is_right = true;
    for (const py::handle each : after) is_right = is_right && is_waitable(each);
  }
  if (!is_right) {
    throw py::type_error("after= takes a stream, an event, a list of them, or kvzc.NOW");
  }
  return reinterpret_cast<std::uint64_t>(after.ptr());
}

const RemoteView& remote_of(Direction direction, py::handle remote) {
  if (!py::isinstance<RemoteView>(remote)) {
    throw py::type_error(
        (direction == Direction::kPut
             ? "the target of a put is a RemoteHandle or a part of one, not "
             : "the source of a get is a RemoteHandle or a part of one, not ") +
        py::str(py::type::of(remote)).cast<std::string>() +
        (direction == Direction::kPut ? ". The order is put(source, target)"
                                      : ". The order is get(target, source)"));
  }
  return remote.cast<const RemoteView&>();
}

constexpr const char* kNotAccepted =
    "the transfer was not accepted in time, nothing was posted: ";

template <typename Deadline>
CompletionQueue::Place reserve(CompletionQueue& queue, bool may_wait, const Deadline& deadline) {
  Result<CompletionQueue::Place> place = queue.reserve();
  if (place.status().code() == Code::kWouldBlock && may_wait) {
    const Status waited = wait_in_slices(deadline(), [&](std::int64_t slice_ns) {
      queue.wait_for_room(slice_ns);
      place = queue.reserve();
      return place.status();
    });
    if (waited.code() == Code::kWouldBlock) {
      raise(Status(Code::kTimedOut, kNotAccepted + std::string(waited.text())));
    }
  }
  return take(std::move(place));
}

// Calls `attempt` until it is accepted, sleeping in `wait_for_room` while there is no room.
template <typename Attempt, typename WaitForRoom>
PyTransferPointer accept(const std::shared_ptr<PyEngine>& owner, const TransferArguments& arguments,
                         bool is_quick, const Attempt& attempt, const WaitForRoom& wait_for_room) {
  TransferOptions options;
  options.after = after_token(arguments.after);
  if (arguments.notify) options.notify = std::string_view(*arguments.notify);
  options.deadline_ns = cancel_deadline_of(arguments.deadline);
  std::string label;
  if (owner->is_traced && !arguments.label.is_none()) {
    const py::str text(arguments.label);
    options.label = label = text.attr("encode")("utf-8", "backslashreplace").cast<std::string>();
  }
  check_timeout(arguments.accept_timeout);
  std::optional<std::int64_t> accept_by;  // From the first time that there is something to wait for.
  const auto accept_deadline = [&] {
    if (!accept_by) {
      accept_by = std::min(deadline_of(arguments.accept_timeout, owner->default_timeout),
                           options.deadline_ns);
    }
    return *accept_by;
  };
  const bool may_wait = arguments.accept_timeout.value_or(1) > 0;
  CompletionQueue::Place place;
  if (arguments.queue != nullptr) place = reserve(*arguments.queue, may_wait, accept_deadline);
  Result<Transfer> transfer = [&] {
    if (is_quick) {
      const HoldBack objects;
      return attempt(options);
    }
    const GilRelease release;
    return attempt(options);
  }();
  if (transfer.status().code() == Code::kWouldBlock && may_wait) {
    const Status waited = wait_in_slices(accept_deadline(), [&](std::int64_t slice_ns) {
      wait_for_room(options, slice_ns);
      transfer = attempt(options);
      return transfer.is_ok() ? Status::ok() : transfer.status();
    });
    if (waited.code() == Code::kWouldBlock) {
      raise(Status(Code::kTimedOut, kNotAccepted + std::string(waited.text())));
    }
  }
  PyTransferPointer out(new PyTransfer{owner, take(std::move(transfer)), arguments.label});
  if (arguments.queue != nullptr) std::move(place).fill(out->transfer, origin_of(*out));
  return out;
}

PyTransferPointer start(const std::shared_ptr<PyEngine>& owner, Direction direction,
                        std::span<const TransferItem> items, const TransferArguments& arguments) {
  Engine& engine = *owner->engine;
  std::uint64_t nbytes = 0;
  for (const TransferItem& item : items) nbytes += item.local->view.nbytes();
  return accept(
      owner, arguments, nbytes <= kQuickBytes,
      [&](const TransferOptions& options) {
        return direction == Direction::kPut ? engine.try_put(items, options)
                                            : engine.try_get(items, options);
      },
      [&](const TransferOptions& options, std::int64_t slice_ns) {
        engine.wait_for_room(*items[0].remote, options, slice_ns);
      });
}

template <typename Target>
PyTransferPointer start_notify(const std::shared_ptr<PyEngine>& owner, const Target& target,
                               const TransferArguments& arguments) {
  release_waiting_objects();
  Engine& engine = *owner->engine;
  return accept(
      owner, arguments, true,
      [&](const TransferOptions& options) { return engine.try_notify(target, options); },
      [&](const TransferOptions& options, std::int64_t slice_ns) {
        engine.wait_for_room(target, options, slice_ns);
      });
}

}  // namespace

const LocalView& local_of(Engine& engine, Direction direction, py::handle local,
                          std::optional<LocalView>& made) {
  if (py::isinstance<PyLocalView>(local)) return local.cast<const PyLocalView&>();
  if (py::isinstance<PyRegion>(local)) {
    return made.emplace(take(local.cast<PyRegion&>().region.view()));
  }
  if (py::isinstance<RemoteView>(local)) {
    throw py::type_error(
        direction == Direction::kPut
            ? "the source of a put is local: a tensor, an array, a region or its view; got a "
              "remote view. The order is put(source, target)"
            : "the target of a get is local: a tensor, an array, a region or its view; got a "
              "remote view. The order is get(target, source)");
  }
  Described described = describe(local);
  if (direction == Direction::kGet && described.read_only != nullptr) {
    raise(Status(Code::kInvalidArgument, std::string("the target of the get ") +
                                             described.read_only + "; use a writable one"));
  }
  return made.emplace(take(engine.find_or_borrow(described.spec)));
}

PyTransferPointer transfer(const std::shared_ptr<PyEngine>& owner, Direction direction,
                           py::handle local, const RemoteView& remote,
                           const TransferArguments& arguments) {
  release_waiting_objects();
  std::optional<LocalView> made;
  const LocalView& view = local_of(*owner->engine, direction, local, made);
  const TransferItem item{&view, &remote};
  return start(owner, direction, {&item, 1}, arguments);
}

PyTransferPointer transfer_many(const std::shared_ptr<PyEngine>& owner, Direction direction,
                                const Pairs& pairs, const TransferArguments& arguments) {
  release_waiting_objects();
  std::vector<LocalView> locals;
  std::vector<py::object> remotes;  // Held: a generator may be the only other one who does.
  for (const py::handle pair : pairs) {
    if (!py::isinstance<py::sequence>(pair) || py::len(pair) != 2) {
      throw py::type_error(direction == Direction::kPut
                               ? "put_many() takes pairs (source, target)"
                               : "get_many() takes pairs (target, source)");
    }
    const auto both = py::reinterpret_borrow<py::sequence>(pair);
    const py::object local = both[0];  // Held as well: the view may lie in it.
    std::optional<LocalView> made;
    const LocalView& view = local_of(*owner->engine, direction, local, made);
    locals.push_back(made ? *std::move(made) : view);
    remotes.push_back(both[1]);
  }
  std::vector<TransferItem> items;
  for (std::size_t i = 0; i < locals.size(); ++i) {
    items.push_back({&locals[i], &remote_of(direction, remotes[i])});
  }
  return start(owner, direction, items, arguments);
}

PyTransferPointer move(const std::shared_ptr<PyEngine>& owner, const Plan& plan,
                       Direction direction, const Plan::Blocks& blocks,
                       const TransferArguments& arguments) {
  release_waiting_objects();
  Engine& engine = *owner->engine;
  const std::uint64_t most_bytes = plan.block_nbytes() * blocks.local.size();
  return accept(
      owner, arguments, most_bytes <= kQuickBytes,
      [&](const TransferOptions& options) {
        return plan.try_move(engine, direction, blocks, options);
      },
      [&](const TransferOptions& options, std::int64_t slice_ns) {
        engine.wait_for_room(plan.remote(), options, slice_ns);
      });
}

PyTransferPointer notify(const std::shared_ptr<PyEngine>& owner, const RemoteView& target,
                         const TransferArguments& arguments) {
  return start_notify(owner, target, arguments);
}

PyTransferPointer notify(const std::shared_ptr<PyEngine>& owner, const PeerInfo& target,
                         const TransferArguments& arguments) {
  return start_notify(owner, target, arguments);
}

void wait_transfers(std::span<const Transfer> transfers, WaitFor what, std::int64_t deadline_ns) {
  check(wait_in_slices(deadline_ns,
                       [&](std::int64_t slice_ns) { return wait_for(transfers, what, slice_ns); }));
}

namespace {

py::typing::List<PyTransfer> wait_many(const py::typing::Iterable<PyTransfer>& transfers,
                                       const std::optional<double>& timeout,
                                       const std::string& return_when) {
  if (return_when != "all" && return_when != "first") {
    throw py::value_error("return_when is 'all' or 'first'");
  }
  std::vector<py::object> objects;
  std::vector<Transfer> raw;
  double default_timeout = 30.0;
  for (const py::handle each : transfers) {
    const auto& transfer = each.cast<const PyTransfer&>();
    default_timeout = transfer.owner->default_timeout;
    raw.push_back(transfer.transfer);
    objects.push_back(py::reinterpret_borrow<py::object>(each));
  }
  wait_transfers(raw, return_when == "all" ? WaitFor::kAll : WaitFor::kFirst,
                 deadline_of(timeout, default_timeout));
  release_waiting_objects();
  py::typing::List<PyTransfer> ended;
  Status first_error;
  for (std::size_t i = 0; i < raw.size(); ++i) {
    if (!raw[i].has_ended()) continue;
    ended.append(objects[i]);
    if (first_error.is_ok()) first_error = raw[i].status();
  }
  check(first_error);
  return ended;
}

}  // namespace

void declare_transfers(py::module_& module) {
  py::class_<PyTransfer>(
      module, "Transfer",
      "One accepted put, get or notify, until its one end: done, failed or cancelled.\n\n"
      "Dropping it does not stop it.");
}

void bind_transfers(py::module_& module) {
  py::class_<Now>(module, "_Now").def("__repr__", [](const Now&) { return "kvzc.NOW"; });
  module.attr("NOW") = Now{};

  py::reinterpret_borrow<py::class_<PyTransfer>>(module.attr("Transfer"))
      .def_property_readonly(
          "done", [](const PyTransfer& self) { return self.transfer.has_ended(); },
          "Whether it has ended, in whatever way.")
      .def_property_readonly(
          "error",
          [](const PyTransfer& self) {
            return self.transfer.has_ended() ? error_object(self.transfer.status()) : py::none();
          },
          "The error that it ended with, or None.")
      .def_property_readonly(
          "quiet", [](const PyTransfer& self) { return self.transfer.has_ended(); },
          "Whether not one more byte of it can move, on either side. Until then its memory is kept,\n"
          "also when its peer is lost.")
      .def_property_readonly(
          "nbytes", [](const PyTransfer& self) { return self.transfer.nbytes(); },
          "Size of all its parts in bytes.")
      .def_property_readonly(
          "runs", [](const PyTransfer& self) { return self.transfer.run_count(); },
          "Number of pieces that are contiguous on both sides.")
      .def_property_readonly(
          "transport",
          [](const PyTransfer& self) -> py::typing::Optional<py::str> {
            const std::string_view name = self.transfer.transport();
            if (name.empty()) return py::none();
            return py::str(name.data(), name.size());
          },
          "Name of the transport that carries it; None until one is chosen.")
      .def_property_readonly(
          "submitted_ns", [](const PyTransfer& self) { return self.transfer.submitted_ns(); },
          "When it was accepted: CLOCK_MONOTONIC, as time.monotonic_ns().")
      .def_property_readonly(
          "done_ns",
          [](const PyTransfer& self) -> py::typing::Optional<py::int_> {
            if (!self.transfer.has_ended()) return py::none();
            return py::int_(self.transfer.done_ns());
          },
          "When it ended, on the same clock; None before. Up to 1 KiB, of those that were over when the\n"
          "call returned, mostly the same as submitted_ns: a look at the clock takes longer than they.")
      .def_property_readonly(
          "label", [](const PyTransfer& self) { return self.label; },
          "What the caller gave as label=.")
      .def(
          "wait",
          [](const PyTransfer& self, const std::optional<double>& timeout) {
            check_timeout(timeout);
            if (!self.transfer.has_ended()) {
              wait_transfers({&self.transfer, 1}, WaitFor::kAll,
                             deadline_of(timeout, self.owner->default_timeout));
              release_waiting_objects();
            }
            check(self.transfer.status());
          },
          py::arg("timeout") = py::none(),
          "Returns once every byte is readable at the target, by anyone who is told of it.\n\n"
          "timeout: seconds; None is the engine's default, math.inf waits for ever. Raises the\n"
          "transfer's own error; TimedOut, and then the transfer is still running; PeerLost, also\n"
          "when the transfer is not quiet yet (.quiet says so).")
      .def(
          "wait_on", [](const PyTransfer&, const py::object&) {}, py::arg("stream"),
          "Has a device's stream wait for the transfer, not the host. On CPU memory, which is all that\n"
          "this version moves, it does nothing, so that calling code is one for both.")
      .def(
          "cancel",
          [](const PyTransfer& self, const std::optional<double>& timeout) {
            const std::int64_t deadline = deadline_of(timeout, self.owner->default_timeout);
            check(wait_in_slices(
                deadline, [&](std::int64_t slice_ns) { return self.transfer.cancel(slice_ns); }));
            release_waiting_objects();
          },
          py::arg("timeout") = py::none(),
          "Stops it and returns when it is quiet: as Cancelled, or done if it was faster. What was\n"
          "not begun is dropped; what was begun is bounded and waited for. Raises TimedOut when it\n"
          "is not quiet in time; it is still running then, and its memory is not to be used.")
      .def(
          "__await__",
          [](const py::object& self) {
            return py::module_::import("kvzc._aio").attr("wait")(self).attr("__await__")();
          },
          "Waits on an event loop that keeps running. Raises the transfer's own error, and PeerLost\n"
          "as wait() does. A task that is cancelled meanwhile leaves the transfer running.")
      .def_property_readonly(
          "_lost", [](const PyTransfer& self) { return error_object(self.transfer.peer_status()); },
          "Why the peer that it goes to is lost, or None.")
      .def(
          "__eq__",
          [](const PyTransfer& self, const py::object& other) -> py::object {
            if (!py::isinstance<PyTransfer>(other)) {
              return py::reinterpret_borrow<py::object>(Py_NotImplemented);
            }
            return py::bool_(self.transfer == other.cast<const PyTransfer&>().transfer);
          },
          "The same transfer, whoever gave it: put() or a queue.")
      .def("__hash__", [](const PyTransfer& self) { return self.transfer.hash(); })
      .def("__repr__", [](const PyTransfer& self) {
        std::string what = "running";
        if (self.transfer.has_ended()) {
          const Status status = self.transfer.status();
          what = status.is_ok() ? "done" : status.to_string();
        }
        return "<kvzc.Transfer " + std::to_string(self.transfer.nbytes()) + " bytes, " + what + ">";
      });

  constexpr const char* kWaitDoc =
      "Waits for several transfers and returns those that have ended.\n\n"
      "return_when: 'all' or 'first'. Raises the first error of those that ended, or\n"
      "TimedOut, and then those that run go on.";
  module.def("wait", &wait_many, py::arg("transfers"), py::arg("timeout") = py::none(),
             py::arg("return_when") = "all", kWaitDoc);
  const py::handle engine = module.attr("Engine");
  engine.attr("wait") = py::cpp_function(
      [](const std::shared_ptr<PyEngine>&, const py::typing::Iterable<PyTransfer>& transfers,
         const std::optional<double>& timeout, const std::string& return_when) {
        return wait_many(transfers, timeout, return_when);
      },
      py::name("wait"), py::is_method(engine), py::arg("transfers"),
      py::arg("timeout") = py::none(), py::arg("return_when") = "all", kWaitDoc);
}

}  // namespace kvzc::bindings

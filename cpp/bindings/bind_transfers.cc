// Starting transfers, and waiting for them.

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

LocalView source_of(Engine& engine, py::handle source) {
  if (py::isinstance<LocalView>(source)) return source.cast<LocalView>();
  if (py::isinstance<PyRegion>(source)) return take(source.cast<PyRegion&>().region.view());
  if (py::isinstance<RemoteView>(source)) {
    throw py::type_error(
        "the source of a put is local: a tensor, an array, a region or its view; got a remote "
        "view. The order is put(source, target)");
  }
  return take(engine.find_or_borrow(describe(source).spec));
}

std::unique_ptr<PyTransfer> start(const std::shared_ptr<PyEngine>& owner,
                                  std::span<const PutItem> items, const PutArguments& arguments) {
  Engine& engine = *owner->engine;
  PutOptions options;
  options.after = after_token(arguments.after);
  if (arguments.notify) options.notify = std::string_view(*arguments.notify);
  const std::int64_t deadline = deadline_of(arguments.accept_timeout, owner->default_timeout);
  const bool may_wait = arguments.accept_timeout.value_or(1) > 0;
  std::uint64_t nbytes = 0;
  for (const PutItem& item : items) nbytes += item.source->view.nbytes();
  const auto attempt = [&] {
    if (nbytes <= kQuickBytes) return engine.try_put(items, options);
    const GilRelease release;
    return engine.try_put(items, options);
  };
  Result<Transfer> transfer = attempt();
  if (transfer.status().code() == Code::kWouldBlock && may_wait) {
    const Status waited = wait_in_slices(deadline, [&](std::int64_t slice_ns) {
      engine.wait_for_room(*items[0].target, options, slice_ns);
      transfer = engine.try_put(items, options);
      return transfer.is_ok() ? Status::ok() : transfer.status();
    });
    if (waited.code() == Code::kWouldBlock) {
      raise(Status(Code::kTimedOut, "the transfer was not accepted in time, nothing was posted: " +
                                        std::string(waited.text())));
    }
  }
  return std::unique_ptr<PyTransfer>(
      new PyTransfer{owner, take(std::move(transfer)), arguments.label});
}

const RemoteView& target_of(py::handle target) {
  if (!py::isinstance<RemoteView>(target)) {
    throw py::type_error("the target of a put is a RemoteHandle or a part of one, not " +
                         py::str(py::type::of(target)).cast<std::string>() +
                         ". The order is put(source, target)");
  }
  return target.cast<const RemoteView&>();
}

}  // namespace

std::unique_ptr<PyTransfer> put(const std::shared_ptr<PyEngine>& owner, py::handle source,
                                const RemoteView& target, const PutArguments& arguments) {
  release_waiting_objects();
  const LocalView local = source_of(*owner->engine, source);
  const PutItem item{&local, &target};
  return start(owner, {&item, 1}, arguments);
}

std::unique_ptr<PyTransfer> put_many(const std::shared_ptr<PyEngine>& owner, const Pairs& pairs,
                                     const PutArguments& arguments) {
  release_waiting_objects();
  std::vector<LocalView> sources;
  std::vector<py::object> targets;  // Held: a generator may be the only other one who does.
  for (const py::handle pair : pairs) {
    if (!py::isinstance<py::sequence>(pair) || py::len(pair) != 2) {
      throw py::type_error("put_many() takes pairs (source, target)");
    }
    const auto both = py::reinterpret_borrow<py::sequence>(pair);
    sources.push_back(source_of(*owner->engine, both[0]));
    targets.push_back(both[1]);
  }
  std::vector<PutItem> items;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    items.push_back({&sources[i], &target_of(targets[i])});
  }
  return start(owner, items, arguments);
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

void bind_transfers(py::module_& module) {
  py::class_<Now>(module, "_Now").def("__repr__", [](const Now&) { return "kvzc.NOW"; });
  module.attr("NOW") = Now{};

  py::class_<PyTransfer>(module, "Transfer",
                         "One accepted put, until its one end: done, failed or cancelled.\n\n"
                         "Dropping it does not stop it.")
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
          "Whether not one more byte of it can move.")
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
          "When it ended, on the same clock; None before.")
      .def_property_readonly(
          "label", [](const PyTransfer& self) { return self.label; },
          "What the caller gave as label=.")
      .def(
          "wait",
          [](const PyTransfer& self, const std::optional<double>& timeout) {
            const std::int64_t deadline = deadline_of(timeout, self.owner->default_timeout);
            if (!self.transfer.has_ended()) {
              wait_transfers({&self.transfer, 1}, WaitFor::kAll, deadline);
              release_waiting_objects();
            }
            check(self.transfer.status());
          },
          py::arg("timeout") = py::none(),
          "Returns once every byte is readable at the target, by anyone who is told of it.\n\n"
          "timeout: seconds; None is the engine's default, math.inf waits for ever. Raises the\n"
          "transfer's own error, or TimedOut, and then the transfer is still running.")
      .def(
          "cancel",
          [](const PyTransfer& self, const std::optional<double>& timeout) {
            const std::int64_t deadline = deadline_of(timeout, self.owner->default_timeout);
            check(wait_in_slices(
                deadline, [&](std::int64_t slice_ns) { return self.transfer.cancel(slice_ns); }));
            release_waiting_objects();
          },
          py::arg("timeout") = py::none(),
          "Stops it and returns when it is quiet: as Cancelled, or done if it was faster. Raises\n"
          "TimedOut when it is not quiet in time; it is still running then.")
      .def("__repr__", [](const PyTransfer& self) {
        std::string what = "running";
        if (self.transfer.has_ended()) {
          const Status status = self.transfer.status();
          what = status.is_ok() ? "done" : status.to_string();
        }
        return "<kvzc.Transfer " + std::to_string(self.transfer.nbytes()) + " bytes, " + what + ">";
      });

  module.def("wait", &wait_many, py::arg("transfers"), py::arg("timeout") = py::none(),
             py::arg("return_when") = "all",
             "Waits for several transfers and returns those that have ended.\n\n"
             "return_when: 'all' or 'first'. Raises the first error of those that ended, or\n"
             "TimedOut, and then those that run go on.");
}

}  // namespace kvzc::bindings

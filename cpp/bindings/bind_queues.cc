// Completion queues.

#include <algorithm>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

// So many transfers, of any engine.
constexpr std::size_t kDefaultDepth = 16384;

std::vector<PyTransferPointer> wrap(std::vector<CompletionQueue::Entry> entries) {
  std::vector<PyTransferPointer> out;
  out.reserve(entries.size());
  for (CompletionQueue::Entry& entry : entries) {
    const auto& origin = *static_cast<const Origin*>(entry.label.get());
    const py::handle label(static_cast<PyObject*>(origin.label.get()));
    out.push_back(PyTransferPointer(new PyTransfer{
        origin.owner, std::move(entry.transfer), py::reinterpret_borrow<py::object>(label)}));
  }
  return out;
}

std::vector<PyTransferPointer> wait_for_some(CompletionQueue& self,
                                             const std::optional<double>& timeout, std::size_t max) {
  std::vector<CompletionQueue::Entry> out;
  check(wait_in_slices(deadline_of(timeout, kDefaultTimeoutSeconds), [&](std::int64_t slice_ns) {
    Result<std::vector<CompletionQueue::Entry>> taken = self.wait(max, slice_ns);
    if (taken.is_ok()) out = taken.take();
    return taken.status();
  }));
  return wrap(std::move(out));
}

}  // namespace

std::shared_ptr<Origin> origin_of(const PyTransfer& transfer) {
  return std::make_shared<Origin>(transfer.owner, keep_alive(transfer.label));
}

void declare_queues(py::module_& module) {
  py::class_<CompletionQueue, std::shared_ptr<CompletionQueue>>(
      module, "CompletionQueue",
      "Gives back the transfers that were started with queue=, as they end.\n\n"
      "depth: how many may be running or not taken yet; a put beyond that is pushed back, so that\n"
      "    no end is ever lost. One queue may serve several engines and threads.\n\n"
      "There are no callbacks: they would run on kvzc's threads, hold up its other transfers and\n"
      "meet the caller's locks. A queue gives the same to whoever has time for it.");
}

void bind_queues(py::module_& module) {
  py::reinterpret_borrow<py::class_<CompletionQueue, std::shared_ptr<CompletionQueue>>>(
      module.attr("CompletionQueue"))
      .def(py::init([](std::size_t depth) { return take(CompletionQueue::create(depth)); }),
           py::arg("depth") = kDefaultDepth)
      .def(
          "poll",
          [](CompletionQueue& self, std::size_t max) { return wrap(take(self.poll(max))); },
          py::arg("max") = 64,
          "Takes up to `max` transfers that have ended, in that order; never waits. Look at .error:\n"
          "a transfer that failed raises nothing here. Raises Closed.")
      .def("wait", &wait_for_some, py::arg("timeout") = py::none(), py::kw_only(),
           py::arg("max") = 64,
           "Takes up to `max` transfers as soon as one has ended, helping with the copying meanwhile.\n\n"
           "timeout: seconds; None is 30, math.inf waits for ever. Raises TimedOut, Closed.")
      .def(
          "fileno", [](CompletionQueue& self) { return take(self.fd()); },
          "A descriptor that is readable while poll() gives something; for select and event loops.\n"
          "It belongs to the queue.")
      .def_property_readonly("depth", &CompletionQueue::depth,
                             "How many may be running or not taken yet.")
      .def_property_readonly("running", &CompletionQueue::running, "Those that have not ended.")
      .def_property_readonly("ended", &CompletionQueue::ended,
                             "Those that have ended and were not taken.")
      .def_property_readonly("closed", &CompletionQueue::is_closed, "Whether close() was called.")
      .def("close", &CompletionQueue::close,
           "Forgets what it holds; transfers that run go on. Waits end with Closed. Idempotent.")
      .def(
          "_add",
          [](CompletionQueue& self, const PyTransfer& transfer, const py::object& label) {
            check(transfer.transfer.usable_here());
            const PyTransfer labelled{transfer.owner, transfer.transfer, label};
            take(self.reserve()).fill(transfer.transfer, origin_of(labelled));
          },
          py::arg("transfer"), py::arg("label"),
          "Takes in a transfer that runs already.")
      .def(
          "__aiter__",
          [](const py::object& self) {
            return py::module_::import("kvzc._aio").attr("iterate")(self);
          },
          "Gives transfers as they end, on an event loop that keeps running.")
      .def("__enter__", [](std::shared_ptr<CompletionQueue> self) { return self; })
      .def(
          "__exit__",
          [](CompletionQueue& self, const py::object&, const py::object&, const py::object&) {
            self.close();
          },
          py::arg("type"), py::arg("value"), py::arg("traceback"))
      .def("__repr__", [](const CompletionQueue& self) {
        return "<kvzc.CompletionQueue of " + std::to_string(self.depth()) + ", " +
               std::to_string(self.running()) + " running, " + std::to_string(self.ended()) +
               " ended>";
      });
}

}  // namespace kvzc::bindings

// Arrivals and peers.

#include "bindings.h"

namespace kvzc::bindings {
namespace {

struct PyArrival {
  std::shared_ptr<PyEngine> owner;
  Arrival arrival;
};

std::vector<PyArrival> wrap(const std::shared_ptr<PyEngine>& owner, std::vector<Arrival> arrivals) {
  std::vector<PyArrival> out;
  out.reserve(arrivals.size());
  for (Arrival& arrival : arrivals) out.push_back({owner, std::move(arrival)});
  return out;
}

std::vector<Arrival> wait_arrivals(const std::shared_ptr<PyEngine>& owner, const py::bytes& tag,
                                   std::size_t count, const std::optional<PyPeer>& peer,
                                   const std::optional<double>& timeout) {
  const std::string_view text = tag;
  if (text.size() > kMaxTagBytes) {
    raise(Status(Code::kInvalidArgument, "a tag has at most 240 bytes; this one can never arrive"));
  }
  const PeerInfo* from = peer ? peer->info.get() : nullptr;
  const std::int64_t deadline_ns = deadline_of(timeout, owner->default_timeout);
  std::optional<GilRelease> without_gil(std::in_place);
  bool is_interrupted = false;
  const auto go_on = [&] {
    without_gil.reset();
    is_interrupted = PyErr_CheckSignals() != 0;
    without_gil.emplace();
    return !is_interrupted;
  };
  Result<std::vector<Arrival>> taken =
      owner->engine->wait_arrivals(text, count, from, deadline_ns, go_on);
  without_gil.reset();
  if (is_interrupted) throw py::error_already_set();
  return take(std::move(taken));
}

}  // namespace

void bind_arrivals(py::module_& module) {
  py::class_<PyPeer>(module, "Peer", "Another engine, as this one knows it.")
      .def_property_readonly(
          "name", [](const PyPeer& self) { return self.info->engine_name; },
          "The name that its engine was made with.")
      .def_property_readonly(
          "incarnation",
          [](const PyPeer& self) { return incarnation_text(self.info->incarnation); },
          "Random per start of that engine, as 32 hexadecimal digits.")
      .def_property_readonly(
          "pid", [](const PyPeer& self) { return self.info->pid; },
          "Its process, or 0 when that is in another pid namespace or on another host.")
      .def_property_readonly(
          "uid", [](const PyPeer& self) { return self.info->uid; },
          "Its user id; 0 when it is on another host.")
      .def_property_readonly(
          "address",
          [](const PyPeer& self) -> std::optional<std::string> {
            if (self.info->address.empty()) return std::nullopt;
            return self.info->address;
          },
          "The other end of the connection, \"host:port\"; None when it is on this host.")
      .def_property_readonly(
          "lost",
          [](const PyPeer& self) { return !self.owner->engine->peer_status(*self.info).is_ok(); },
          "Whether it is known to be gone.")
      .def_property_readonly(
          "error",
          [](const PyPeer& self) {
            return error_object(self.owner->engine->peer_status(*self.info));
          },
          "Why it is lost, or None.")
      .def(
          "notify",
          [](const PyPeer& self, const py::bytes& tag, const std::optional<double>& deadline,
             const std::optional<double>& accept_timeout) {
            const py::none nothing;
            const std::optional<py::bytes> sent(tag);
            return notify(self.owner, *self.info,
                          {nothing, sent, nothing, deadline, accept_timeout});
          },
          py::arg("tag"), py::kw_only(), py::arg("deadline") = py::none(),
          py::arg("accept_timeout") = py::none(),
          "Sends a tag of up to 240 bytes without data. Returns a Transfer. Raises PeerLost,\n"
          "WouldBlock, TimedOut, Closed.")
      .def("__repr__", [](const PyPeer& self) {
        return "<kvzc.Peer '" + self.info->engine_name + "', " +
               (self.info->address.empty() ? "pid " + std::to_string(self.info->pid)
                                           : "at " + self.info->address) +
               ">";
      });

  py::class_<PyArrival>(module, "Arrival", "A tag that has come in.")
      .def_property_readonly(
          "tag", [](const PyArrival& self) { return py::bytes(self.arrival.tag); },
          "The tag, as its sender gave it.")
      .def_property_readonly(
          "peer", [](const PyArrival& self) { return PyPeer{self.owner, self.arrival.peer}; },
          "Who sent it.")
      .def_property_readonly(
          "error",
          [](const PyArrival& self) {
            if (self.arrival.code == Code::kOk) return error_object(Status::ok());
            return error_object(
                Status(self.arrival.code,
                       "the transfer that carried this tag failed at its sender; the "
                       "bytes at the target are not whole"));
          },
          "None, and every byte is readable; or why the sender's transfer failed.")
      .def_property_readonly(
          "arrived_ns", [](const PyArrival& self) { return self.arrival.arrived_ns; },
          "When this engine saw it: CLOCK_MONOTONIC, as time.monotonic_ns().")
      .def("__repr__", [](const PyArrival& self) {
        return "<kvzc.Arrival " + py::repr(py::bytes(self.arrival.tag)).cast<std::string>() +
               (self.arrival.code == Code::kOk
                    ? ">"
                    : ", " + std::string(code_name(self.arrival.code)) + ">");
      });

  py::class_<PyArrivals>(module, "Arrivals",
                         "The tags that peers have sent to an engine.\n\n"
                         "A tag that somebody waits for is not given to poll().")
      .def(
          "wait",
          [](const PyArrivals& self, const py::bytes& tag, const std::optional<PyPeer>& peer,
             const std::optional<double>& timeout) {
            const std::shared_ptr<PyEngine> owner = self.engine();
            return PyArrival{owner, std::move(wait_arrivals(owner, tag, 1, peer, timeout)[0])};
          },
          py::arg("tag"), py::kw_only(), py::arg("peer") = py::none(),
          py::arg("timeout") = py::none(),
          "Takes one arrival of `tag`: when it returns, its bytes are readable unless .error says\n"
          "otherwise. With `peer`, only from that peer, and PeerLost when it is gone. Raises\n"
          "TimedOut after `timeout` seconds (None: the engine's default), Closed.")
      .def(
          "wait",
          [](const PyArrivals& self, const py::bytes& tag, std::size_t count,
             const std::optional<PyPeer>& peer, const std::optional<double>& timeout) {
            const std::shared_ptr<PyEngine> owner = self.engine();
            return wrap(owner, wait_arrivals(owner, tag, count, peer, timeout));
          },
          py::arg("tag"), py::arg("count"), py::kw_only(),
           py::arg("peer") = py::none(), py::arg("timeout") = py::none(),
           "Takes `count` arrivals of `tag` together, in the order in which they came.")
      .def(
          "poll",
          [](const PyArrivals& self, std::size_t max) {
            const std::shared_ptr<PyEngine> owner = self.engine();
            check(owner->engine->usable());
            return wrap(owner, owner->engine->poll_arrivals(max));
          },
          py::arg("max") = 64, "Takes up to `max` arrivals, the oldest first; never waits.")
      .def(
          "forget",
          [](const PyArrivals& self, const py::bytes& tag) {
            const std::shared_ptr<PyEngine> owner = self.engine();
            check(owner->engine->usable());
            owner->engine->forget_arrivals(std::string_view(tag));
          },
          py::arg("tag"),
          "Discards the arrivals of `tag`, those to come too, for arrival_ttl seconds or until\n"
          "somebody waits for it.")
      .def(
          "fileno",
          [](const PyArrivals& self) {
            const std::shared_ptr<PyEngine> owner = self.engine();
            check(owner->engine->usable());
            return owner->engine->arrivals_fd();
          },
          "A descriptor that is readable when poll() may give something; for select and event\n"
          "loops. It belongs to the engine.")
      .def(
          "__aiter__",
          [](const py::object& self) {
            return py::module_::import("kvzc._aio").attr("iterate")(self);
          },
          "Gives arrivals as poll() does, on an event loop that keeps running.");
  module.attr("arrivals") = PyArrivals{};
}

}  // namespace kvzc::bindings

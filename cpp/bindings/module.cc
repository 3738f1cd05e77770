// The module kvzc._core. Python code outside the package imports kvzc, not this.

#include "bindings.h"
#include "kvzc/info.h"

PYBIND11_MODULE(_core, module) {
  using namespace kvzc::bindings;
  module.doc() = "The compiled core of kvzc.";
  module.attr("__version__") = KVZC_VERSION;
  bind_errors(module);
  declare_engine(module);
  declare_transfers(module);
  declare_queues(module);
  declare_plans(module);
  bind_tensors(module);
  bind_memory(module);
  bind_transfers(module);
  bind_queues(module);
  bind_plans(module);
  bind_addresses(module);
  bind_arrivals(module);
  bind_engine(module);
  module.def(
      "transports",
      [] {
        py::typing::List<py::typing::Tuple<py::str, py::bool_, py::str>> out;
        for (const kvzc::TransportInfo& info : kvzc::list_transports()) {
          out.append(py::make_tuple(std::string(info.name), info.is_available, info.reason));
        }
        return out;
      },
      "Lists (name, available, reason) of every transport, the preferred first.");
}

// Memory by its address: raw memory, and catalogs of an engine's.

#include <cstdio>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

std::string words(std::uint64_t address, std::uint64_t nbytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%llu bytes at 0x%llx", static_cast<unsigned long long>(nbytes),
                static_cast<unsigned long long>(address));
  return text;
}

std::string_view bytes_in(const py::bytes& data) { return data; }

Catalog catalog_from(const py::bytes& data) {
  const std::string_view bytes = bytes_in(data);
  return take(Catalog::decode(std::as_bytes(std::span(bytes))));
}

py::bytes bytes_of(const Catalog& self) {
  const std::vector<std::byte> bytes = take(self.encode());
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

constexpr const char* kResolveDoc =
    "Gives the owner's bytes at this address of its own as uint8[nbytes]: the target of a put, the\n"
    "source of a get. Raises OutOfRange, naming them, when they are not within one region of the\n"
    "catalog.";

}  // namespace

void bind_addresses(py::module_& module) {
  py::class_<RawMemory>(
      module, "Memory",
      "Memory of this process that is known by numbers alone, as uint8[nbytes].\n\n"
      "address, nbytes: all of it must be mapped; whether it can be written is looked up.\n"
      "device: 'cpu' in this version.\n"
      "owner: an object that keeps it mapped; held as long as kvzc uses the memory. Without one\n"
      "    that is the caller's to see to, until the region is closed or the transfer has ended.\n\n"
      "For register(), and for put() and get(). Raises InvalidArgument naming the first byte that is\n"
      "not mapped.")
      .def(py::init([](std::uint64_t address, std::uint64_t nbytes, const std::string& device,
                       const py::object& owner) {
             if (device != "cpu") {
               refuse(Code::kUnsupported,
                      "this version of kvzc moves memory on 'cpu', not on '" + device + "'");
             }
             return RawMemory{address, nbytes, take(is_writable_memory(address, nbytes)), owner};
           }),
           py::arg("address"), py::arg("nbytes"), py::arg("device") = "cpu",
           py::arg("owner") = py::none())
      .def_readonly("address", &RawMemory::address, "Where it begins.")
      .def_readonly("nbytes", &RawMemory::nbytes, "Size in bytes.")
      .def_readonly("writable", &RawMemory::is_writable, "Whether it can be written.")
      .def_readonly("owner", &RawMemory::owner, "What keeps it mapped, or None.")
      .def_property_readonly(
          "device", [](const RawMemory&) { return "cpu"; }, "Where it is.")
      .def("__repr__", [](const RawMemory& self) {
        return "<kvzc.Memory, " + words(self.address, self.nbytes) + ">";
      });

  py::class_<Catalog>(
      module, "Catalog",
      "All memory that an engine had registered when it was made: see Engine.catalog(). Whoever has\n"
      "its bytes may put into and get from all of it, so they travel by a channel that you trust.")
      .def_static("from_bytes", &catalog_from, py::arg("data"),
                  "Reads what to_bytes() gave. Raises BadHandle (a ValueError).")
      .def_static(
          "from_text", [](const std::string& text) { return take(Catalog::from_text(text)); },
          py::arg("text"), "Reads what to_text() gave. Raises BadHandle (a ValueError).")
      .def("to_bytes", &bytes_of, "Gives the catalog as bytes, versioned and complete.")
      .def(
          "to_text", [](const Catalog& self) { return self.to_text(take(self.encode())); },
          "Gives the catalog as text that fits into URLs and JSON.")
      .def("resolve", [](const Catalog& self, std::uint64_t address, std::uint64_t nbytes) {
             return take(self.resolve(address, nbytes));
           },
           py::arg("address"), py::arg("nbytes"), kResolveDoc)
      .def_property_readonly(
          "ranges",
          [](const Catalog& self) {
            py::typing::List<py::typing::Tuple<py::int_, py::int_>> out;
            for (const Catalog::Range& each : self.ranges()) {
              out.append(py::make_tuple(each.address, each.nbytes));
            }
            return out;
          },
          "(address, nbytes) of all it holds, in order; none lies within another.")
      .def_property_readonly("engine", &Catalog::engine_name, "Name of the engine that owns it.")
      .def("__repr__", [](const Catalog& self) {
        return "<kvzc.Catalog of " + std::to_string(self.ranges().size()) + " ranges of engine '" +
               self.engine_name() + "'>";
      });

  const py::handle engine = module.attr("Engine");
  engine.attr("catalog") = py::cpp_function(
      [](const std::shared_ptr<PyEngine>& self) {
        Result<Catalog> made = [&] {
          const GilRelease release;
          return self->engine->catalog();
        }();
        return take(std::move(made));
      },
      py::name("catalog"), py::is_method(engine),
      "Gives a Catalog of all regions that are open now, for callers that exchange raw addresses.\n\n"
      "Opt-in, since it holds the keys of them all. What is registered later needs a fresh one; what\n"
      "is closed later is refused as Revoked. Raises LimitExceeded, Closed.");
  engine.attr("resolve") = py::cpp_function(
      [](const std::shared_ptr<PyEngine>&, const Catalog& catalog, std::uint64_t address,
         std::uint64_t nbytes) { return take(catalog.resolve(address, nbytes)); },
      py::name("resolve"), py::is_method(engine), py::arg("catalog"), py::arg("address"),
      py::arg("nbytes"), kResolveDoc);
}

}  // namespace kvzc::bindings

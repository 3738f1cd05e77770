// Regions, handles and their views.

#include "bindings.h"

namespace kvzc::bindings {
namespace {

constexpr const char* kIndexDoc =
    "The part that an index selects. Copies nothing, also with a list of block ids, where torch's\n"
    "own indexing would copy.\n\n"
    "Integers, slices of any step, '...', and on each axis at most one list, range or\n"
    "one-dimensional array of integers (block ids). Several lists act each on its own axis, as\n"
    "numpy.ix_ does. In a group, first a name, a list of names or a slice.\n\n"
    "Raises OutOfRange (an IndexError) beyond the shape, Closed for a closed region.";

const TensorView& only_tensor(const View& view) {
  if (view.is_group()) {
    raise(Status(Code::kInvalidArgument,
                 "a group has one shape and dtype per tensor; pick one by name first"));
  }
  return view.tensors[0];
}

std::string words(const View& view) {
  if (!view.is_group()) return view.tensors[0].describe();
  return std::to_string(view.tensors.size()) + " tensors, " + std::to_string(view.nbytes()) +
         " bytes";
}

// What regions and views have in common; `view_of` gives the View of one.
template <typename Class, typename ViewOf>
void add_view_properties(Class& type, ViewOf view_of) {
  using T = typename Class::type;
  type.def_property_readonly(
          "shape",
          [view_of](const T& self) {
            return py::typing::Tuple<py::int_, py::ellipsis>(
                py::cast(only_tensor(view_of(self)).shape()));
          },
          "Extents of the tensor. Raises InvalidArgument for a group.")
      .def_property_readonly(
          "dtype",
          [view_of](const T& self) {
            return std::string(dtype_name(only_tensor(view_of(self)).dtype));
          },
          "Name of the element type, as in torch: 'bfloat16'. Raises InvalidArgument for a group.")
      .def_property_readonly(
          "names", [view_of](const T& self) { return view_of(self).names; },
          "Names of a group's tensors, in order; empty for a single tensor.")
      .def_property_readonly(
          "nbytes", [view_of](const T& self) { return view_of(self).nbytes(); },
          "Size of all elements in bytes.");
}

std::vector<TensorSpec> specs_of(py::handle object) {
  std::vector<TensorSpec> specs;
  const auto add = [&](const std::string& name, py::handle tensor) {
    Described described = describe(tensor);
    if (described.is_read_only) {
      raise(Status(Code::kInvalidArgument,
                   (name.empty() ? "the memory" : "tensor '" + name + "'") +
                       " is read-only, so no peer may write there; register a writable copy. "
                       "The source of a put need not be registered"));
    }
    described.spec.name = name;
    specs.push_back(std::move(described.spec));
  };
  if (!py::isinstance<py::dict>(object)) {
    add("", object);
    return specs;
  }
  for (const auto& [name, tensor] : py::reinterpret_borrow<py::dict>(object)) {
    if (!py::isinstance<py::str>(name) || py::len(name) == 0) {
      throw py::type_error("a group's keys are its tensors' names, non-empty strings");
    }
    add(name.cast<std::string>(), tensor);
  }
  return specs;
}

py::bytes bytes_of(const PyRemoteHandle& handle) {
  const std::vector<std::byte> bytes = take(encode_handle(handle.handle->info));
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

PyRemoteHandle handle_from(const py::bytes& data) {
  const std::string_view view = data;
  return PyRemoteHandle{take(RemoteView::from_bytes(std::as_bytes(std::span(view))))};
}

}  // namespace

std::unique_ptr<PyRegion> register_object(const std::shared_ptr<PyEngine>& owner,
                                          const py::object& object) {
  release_waiting_objects();
  const std::vector<TensorSpec> specs = specs_of(object);
  return std::make_unique<PyRegion>(owner, take(owner->engine->register_memory(specs)));
}

void bind_memory(py::module_& module) {
  py::class_<LocalView> local(
      module, "LocalView",
      "A part of a region: the source of a put. Made by indexing a region; copies nothing.");
  add_view_properties(local, [](const LocalView& self) -> const View& { return self.view; });
  local
      .def(
          "__getitem__",
          [](const LocalView& self, const py::object& key) {
            return take(self.index(parse_index(key)));
          },
          py::arg("key"), kIndexDoc)
      .def("__repr__",
           [](const LocalView& self) { return "<kvzc.LocalView " + words(self.view) + ">"; });

  py::class_<RemoteView> remote(
      module, "RemoteView",
      "A part of what a handle grants: the target of a put. Made by indexing a handle.");
  add_view_properties(remote, [](const RemoteView& self) -> const View& { return self.view; });
  remote
      .def(
          "__getitem__",
          [](const RemoteView& self, const py::object& key) {
            return take(self.index(parse_index(key)));
          },
          py::arg("key"), kIndexDoc)
      .def("__repr__", [](const RemoteView& self) {
        return "<kvzc.RemoteView " + words(self.view) + " at engine '" +
               self.handle->info.engine_name + "'>";
      });

  py::class_<PyRemoteHandle, RemoteView>(
      module, "RemoteHandle",
      "A grant of another engine's memory. Whoever has its bytes may use it, so they travel by a\n"
      "channel that you trust; nothing of the key shows in repr or str.")
      .def_static("from_bytes", &handle_from, py::arg("data"),
                  "Reads what to_bytes() gave. Raises BadHandle (a ValueError).")
      .def_static(
          "from_text",
          [](const std::string& text) { return PyRemoteHandle{take(RemoteView::from_text(text))}; },
          py::arg("text"), "Reads what to_text() gave. Raises BadHandle (a ValueError).")
      .def("to_bytes", &bytes_of, "Gives the handle as bytes, versioned and complete.")
      .def(
          "to_text",
          [](const PyRemoteHandle& self) {
            return handle_to_text(take(encode_handle(self.handle->info)));
          },
          "Gives the handle as text that fits into URLs and JSON.")
      .def_property_readonly(
          "engine", [](const PyRemoteHandle& self) { return self.handle->info.engine_name; },
          "Name of the engine that owns the memory.")
      .def("__repr__",
           [](const PyRemoteHandle& self) {
             return "<kvzc.RemoteHandle " + words(self.view) + " at engine '" +
                    self.handle->info.engine_name + "'>";
           })
      .def(py::pickle(&bytes_of, &handle_from));

  py::class_<PyRegion> region(
      module, "Region",
      "Memory registered with an engine: one tensor or a group of named ones.\n\n"
      "It keeps the memory alive until close(), and is a context manager. A region that is\n"
      "collected is closed too, without anybody waiting: keep it while peers may write.");
  add_view_properties(region,
                      [](const PyRegion& self) -> const View& { return self.region.layout(); });
  region
      .def(
          "__getitem__",
          [](const PyRegion& self, const py::object& key) {
            return take(take(self.region.view()).index(parse_index(key)));
          },
          py::arg("key"), kIndexDoc)
      .def_property_readonly(
          "path", [](const PyRegion& self) { return self.region.path(); },
          "In words: how peers reach this memory, and what would make it faster.")
      .def_property_readonly(
          "closed", [](const PyRegion& self) { return !self.region.is_open(); },
          "Whether close() was called.")
      .def(
          "handle",
          [](const PyRegion& self) {
            const HandleInfo info = take(self.region.handle());
            return PyRemoteHandle{take(RemoteView::from_bytes(take(encode_handle(info))))};
          },
          "Gives a handle of the whole region, for put and get. Its bytes are the right to write:\n"
          "pass them on by a channel that you trust. Raises Closed.")
      .def(
          "close",
          [](PyRegion& self, const std::optional<double>& timeout) {
            const std::int64_t deadline = deadline_of(timeout, self.owner->default_timeout);
            Status status;
            {
              const GilRelease release;
              status = self.region.close(deadline);
            }
            release_waiting_objects();
            check(status);
          },
          py::arg("timeout") = py::none(),
          "Revokes the region's handles, waits until no peer writes through them, and lets the\n"
          "memory go. Idempotent. Raises TimedOut when a peer was still writing after `timeout`\n"
          "seconds: the handles are revoked, but do not use the memory again before that peer is\n"
          "gone.")
      .def(
          "__enter__", [](PyRegion& self) -> PyRegion& { return self; },
          py::return_value_policy::reference)
      .def(
          "__exit__",
          [](const py::object& self, const py::object&, const py::object&, const py::object&) {
            self.attr("close")();
          },
          py::arg("type"), py::arg("value"), py::arg("traceback"))
      .def("__reduce__",
           [](const PyRegion&) -> py::object {
             throw py::type_error(
                 "a region belongs to its process and is not pickled; send "
                 "region.handle() instead");
           })
      .def("__repr__", [](const PyRegion& self) {
        return "<kvzc.Region " + words(self.region.layout()) +
               (self.region.is_open() ? ">" : ", closed>");
      });
}

}  // namespace kvzc::bindings

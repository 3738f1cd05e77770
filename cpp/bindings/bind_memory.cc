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

constexpr const char* kPermuteDoc =
    "The same memory with its axes in another order, as torch's Tensor.permute(*dims). Copies\n"
    "nothing, also after an index with lists; in a group it applies to every tensor.\n\n"
    "So caches of different layouts go into each other, whichever side is permuted: blocks of\n"
    "[heads, tokens, dim] (HND) come out of blocks of [tokens, heads, dim] (NHD) by\n"
    "put(local[ids].permute(0, 2, 1, 3), handle[remote_ids]).\n\n"
    "Every axis is given once, apart or as one tuple; negative ones count from the end. Raises\n"
    "InvalidArgument (a ValueError), OutOfRange (an IndexError), Closed for a closed region.";

constexpr const char* kViewDoc =
    "The same bytes as elements of another type, as torch's Tensor.view(dtype). Copies and\n"
    "converts nothing; in a group it applies to every tensor.\n\n"
    "Where the sizes of the elements differ the last axis grows or shrinks: it must be\n"
    "contiguous, and its bytes a multiple of the new size.\n\n"
    "dtype: a torch dtype, whatever NumPy makes a dtype of, or a name as .dtype gives it. Raises\n"
    "InvalidArgument (a ValueError) with the remedy, Unsupported for types that kvzc does not\n"
    "move, Closed for a closed region.";

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
          "Name of the element type, as in torch and NumPy: 'bfloat16'. Of other NumPy types, such\n"
          "as structured ones, 'record', the bytes of an element, and a fingerprint of the dtype.\n"
          "Raises InvalidArgument for a group.")
      .def_property_readonly(
          "names", [view_of](const T& self) { return view_of(self).names; },
          "Names of a group's tensors, in order; empty for a single tensor.")
      .def_property_readonly(
          "nbytes", [view_of](const T& self) { return view_of(self).nbytes(); },
          "Size of all elements in bytes.");
}

using Dims = py::Args<py::typing::Union<py::int_, py::typing::Iterable<py::int_>>>;

// What makes a view of a view: `base` gives the core's one, `wrap` what Python gets.
template <typename Class, typename Base, typename Wrap>
void add_views(Class& type, Base base, Wrap wrap) {
  using T = typename Class::type;
  type.def(
          "__getitem__",
          [base, wrap](const T& self, const py::object& key) {
            return wrap(self, take(base(self).index(parse_index(key))));
          },
          py::arg("key"), kIndexDoc)
      .def(
          "permute",
          [base, wrap](const T& self, const Dims& dims) {
            return wrap(self, take(base(self).permute(parse_dims(dims))));
          },
          kPermuteDoc)
      .def(
          "view",
          [base, wrap](const T& self, const py::object& dtype) {
            return wrap(self, take(base(self).view_as(dtype_of(dtype))));
          },
          py::arg("dtype"), kViewDoc);
}

std::vector<TensorSpec> specs_of(py::handle object) {
  std::vector<TensorSpec> specs;
  const auto add = [&](const std::string& name, py::handle tensor) {
    Described described = describe(tensor);
    if (described.read_only != nullptr) {
      raise(Status(Code::kInvalidArgument,
                   (name.empty() ? "the memory" : "tensor '" + name + "'") + " " +
                       described.read_only +
                       ", so no peer may write there; register a writable copy. "
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

constexpr const char* kGrantDoc =
    "Gives out a right to just this part: 'put', 'get' or 'both'. It has its own key and is\n"
    "revoked alone; making one costs microseconds, a hundred thousand may be alive.\n\n"
    "Returns a Grant, whose handle() goes to the other side. The grant holds until revoke(), or\n"
    "until the region is closed, also when the Grant object is dropped. Raises Closed,\n"
    "LimitExceeded.";

constexpr const char* kRevokeDoc =
    "Returns once no put or get through it touches the memory, so that its blocks may be given to\n"
    "somebody else. Transfers that run through it end as Revoked at their senders; other grants,\n"
    "transfers and peers go on. Idempotent.\n\n"
    "timeout: seconds, by default the engine's. A peer that does not leave in time: TimedOut names\n"
    "    it. The grant is revoked all the same, but the memory is in quarantine (see stats()):\n"
    "    do not use it before a later revoke() has returned.\n"
    "force: cut such a peer off instead: its transfers fail, its connection closes, and not one\n"
    "    more byte of it lands; it stays lost to this engine until it makes another engine. Raises\n"
    "    Unsupported, with the reason, where that cannot be had.";

Access access_of(const std::string& name) {
  if (name == "put") return Access::kPut;
  if (name == "get") return Access::kGet;
  if (name == "both") return Access::kBoth;
  throw py::value_error("access is 'put', 'get' or 'both', not '" + name + "'");
}

const char* access_name(Access access) {
  switch (access) {
    case Access::kPut:
      return "put";
    case Access::kGet:
      return "get";
    default:
      return "both";
  }
}

// Waits in slices, so that Ctrl-C is seen, and cuts off only when the time is over.
template <typename Revoke>
void revoke_in_slices(const PyEngine& owner, const std::optional<double>& timeout, bool force,
                      const Revoke& revoke) {
  const std::int64_t deadline = deadline_of(timeout, owner.default_timeout);
  Status status = wait_in_slices(
      deadline, [&](std::int64_t slice_ns) { return revoke(slice_ns, Force::kNo); });
  if (status.code() == Code::kTimedOut && force) {
    const GilRelease release;
    status = revoke(deadline, Force::kYes);
  }
  release_waiting_objects();
  check(status);
}

PyLocalView view_in(const std::shared_ptr<PyEngine>& owner, LocalView view) {
  return PyLocalView{std::move(view), owner};
}

PyGrant grant_of(const std::shared_ptr<PyEngine>& owner, const LocalView& view,
                 const std::string& access) {
  return PyGrant{owner, take(owner->engine->grant(view, access_of(access)))};
}

PyRemoteHandle handle_with(const HandleInfo& info) {
  return PyRemoteHandle{take(RemoteView::from_bytes(take(encode_handle(info))))};
}

py::bytes bytes_of(const PyRemoteHandle& handle) {
  const std::vector<std::byte> bytes = take(encode_handle(handle.handle->info));
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

PyRemoteHandle handle_from(const py::bytes& data) {
  const std::string_view view = data;
  return PyRemoteHandle{take(RemoteView::from_bytes(std::as_bytes(std::span(view))))};
}

void bind_grants(py::module_& module) {
  py::class_<PyGrant> grant(
      module, "Grant",
      "A right that was given out: to put, to get, or both, in one view of a region.\n\n"
      "A context manager: leaving it revokes the grant. Dropping it does not.");
  add_view_properties(grant, [](const PyGrant& self) -> const View& { return self.grant.view(); });
  const auto revoke = [](const PyGrant& self, const std::optional<double>& timeout, bool force) {
    revoke_in_slices(*self.owner, timeout, force, [&](std::int64_t deadline_ns, Force how) {
      return self.grant.revoke(deadline_ns, how);
    });
  };
  grant
      .def(
          "handle", [](const PyGrant& self) { return handle_with(take(self.grant.handle())); },
          "Gives the handle for the other side: just this view, with its own key. Raises Revoked.")
      .def_property_readonly(
          "access", [](const PyGrant& self) { return access_name(self.grant.access()); },
          "'put', 'get' or 'both'.")
      .def_property_readonly(
          "revoked", [](const PyGrant& self) { return self.grant.is_revoked(); },
          "Whether it holds no more.")
      .def("revoke", revoke, py::arg("timeout") = py::none(), py::kw_only(),
           py::arg("force") = false, kRevokeDoc)
      .def(
          "close",
          [revoke](const PyGrant& self, const std::optional<double>& timeout) {
            revoke(self, timeout, false);
          },
          py::arg("timeout") = py::none(), "The same as revoke().")
      .def(
          "__enter__", [](PyGrant& self) -> PyGrant& { return self; },
          py::return_value_policy::reference)
      .def(
          "__exit__",
          [](const py::object& self, const py::object&, const py::object&, const py::object&) {
            self.attr("revoke")();
          },
          py::arg("type"), py::arg("value"), py::arg("traceback"))
      .def("__reduce__",
           [](const PyGrant&) -> py::object {
             throw py::type_error(
                 "a grant belongs to its process and is not pickled; send grant.handle() instead");
           })
      .def("__repr__", [](const PyGrant& self) {
        return "<kvzc.Grant " + std::string(access_name(self.grant.access())) + ", " +
               words(self.grant.view()) + (self.grant.is_revoked() ? ", revoked>" : ">");
      });
}

}  // namespace

std::unique_ptr<PyRegion> register_object(const std::shared_ptr<PyEngine>& owner,
                                          const py::object& object) {
  release_waiting_objects();
  const std::vector<TensorSpec> specs = specs_of(object);
  return std::make_unique<PyRegion>(owner, take(owner->engine->register_memory(specs)));
}

void bind_memory(py::module_& module) {
  py::class_<RemoteView> remote(
      module, "RemoteView",
      "A part of what a handle grants: the target of a put, the source of a get. Made by indexing\n"
      "a handle.");
  add_view_properties(remote, [](const RemoteView& self) -> const View& { return self.view; });
  add_views(
      remote, [](const RemoteView& self) -> const RemoteView& { return self; },
      [](const RemoteView&, RemoteView view) { return view; });
  remote
      .def(
          "notify",
          [](const RemoteView& self, const py::bytes& tag,
             const std::optional<std::shared_ptr<PyEngine>>& engine,
             const std::optional<double>& deadline, const std::optional<double>& accept_timeout) {
            const py::none nothing;
            const std::optional<py::bytes> sent(tag);
            return notify(engine ? *engine : default_engine(), self,
                          {nothing, sent, nothing, deadline, accept_timeout});
          },
          py::arg("tag"), py::kw_only(), py::arg("engine") = py::none(),
          py::arg("deadline") = py::none(), py::arg("accept_timeout") = py::none(),
          "Sends a tag of up to 240 bytes without data to the engine that owns the memory, from\n"
          "`engine` or the default one. Returns a Transfer. Raises as put() does.")
      .def_property_readonly(
          "access", [](const RemoteView& self) { return access_name(self.handle->info.access); },
          "What it grants: 'put', 'get' or 'both'.")
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

  bind_grants(module);

  py::class_<PyLocalView> local(
      module, "LocalView",
      "A part of a region: the source of a put, the target of a get, what a grant covers. Made by\n"
      "indexing a region; copies nothing.");
  add_view_properties(local, [](const PyLocalView& self) -> const View& { return self.view; });
  add_views(
      local, [](const PyLocalView& self) -> const LocalView& { return self; },
      [](const PyLocalView& self, LocalView view) { return view_in(self.owner, std::move(view)); });
  local
      .def(
          "grant",
          [](const PyLocalView& self, const std::string& access) {
            return grant_of(self.owner, self, access);
          },
          py::arg("access") = "both", kGrantDoc)
      .def("__repr__",
           [](const PyLocalView& self) { return "<kvzc.LocalView " + words(self.view) + ">"; });

  py::class_<PyRegion> region(
      module, "Region",
      "Memory registered with an engine: one tensor or a group of named ones.\n\n"
      "It keeps the memory alive until close(), and is a context manager. A region that is\n"
      "collected is closed too, without anybody waiting: keep it while peers may write.");
  add_view_properties(region,
                      [](const PyRegion& self) -> const View& { return self.region.layout(); });
  add_views(
      region, [](const PyRegion& self) { return take(self.region.view()); },
      [](const PyRegion& self, LocalView view) { return view_in(self.owner, std::move(view)); });
  region
      .def_property_readonly(
          "path", [](const PyRegion& self) { return self.region.path(); },
          "In words: how peers reach this memory, and what would make it faster.")
      .def_property_readonly(
          "closed", [](const PyRegion& self) { return !self.region.is_open(); },
          "Whether close() was called.")
      .def(
          "handle",
          [](const PyRegion& self) {
            return handle_with(take(self.region.handle()));
          },
          "Gives a handle of the whole region, for put and get. Its bytes are the right to write:\n"
          "pass them on by a channel that you trust. Raises Closed.")
      .def(
          "close",
          [](PyRegion& self, const std::optional<double>& timeout) {
            revoke_in_slices(
                *self.owner, timeout, false,
                [&](std::int64_t deadline_ns, Force) { return self.region.close(deadline_ns); });
          },
          py::arg("timeout") = py::none(),
          "Revokes the region's grants, waits until no peer touches it through them, and lets the\n"
          "memory go. Idempotent. Raises TimedOut when a peer was still within after `timeout`\n"
          "seconds: the grants are revoked, and the engine keeps the memory until that peer is out\n"
          "of it.")
      .def(
          "grant",
          [](const PyRegion& self, const std::string& access) {
            return grant_of(self.owner, take(self.region.view()), access);
          },
          py::arg("access") = "both", kGrantDoc)
      .def(
          "revoke",
          [](PyRegion& self, const std::optional<double>& timeout, bool force) {
            revoke_in_slices(*self.owner, timeout, force,
                             [&](std::int64_t deadline_ns, Force how) {
                               return self.region.revoke(deadline_ns, how);
                             });
          },
          py::arg("timeout") = py::none(), py::kw_only(), py::arg("force") = false, kRevokeDoc)
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

// Plans: blocks of two groups, moved again and again.

#include <algorithm>
#include <numeric>

#include "bindings.h"
#include "keywords.h"

namespace kvzc::bindings {
namespace {

struct PyPlan {
  std::shared_ptr<PyEngine> owner;
  std::shared_ptr<const Plan> plan;
  std::vector<std::string> names;
};

using Tag = std::optional<py::bytes>;
using Seconds = std::optional<double>;
using Layers = py::typing::Optional<py::object>;

std::unique_ptr<PyPlan> make_plan(const std::shared_ptr<PyEngine>& owner, const py::object& source,
                                  const py::object& target, std::int64_t block_axis) {
  const bool is_source_remote = py::isinstance<RemoteView>(source);
  if (is_source_remote == py::isinstance<RemoteView>(target)) {
    throw py::type_error(
        "a plan is between a local side (a region, its view, or a tensor) and a RemoteHandle or a "
        "part of one");
  }
  const py::object& local = is_source_remote ? target : source;
  const py::object& remote = is_source_remote ? source : target;
  std::optional<LocalView> made;
  LocalView here =
      local_of(*owner->engine, is_source_remote ? Direction::kGet : Direction::kPut, local, made);
  RemoteView there = remote.cast<const RemoteView&>();
  Result<std::shared_ptr<const Plan>> plan = [&] {
    const GilRelease release;  // Large groups take a while.
    return Plan::create(std::move(here), std::move(there), block_axis);
  }();
  std::unique_ptr<PyPlan> out(new PyPlan{owner, take(std::move(plan)), {}});
  out->names = out->plan->layer_names();
  return out;
}

std::uint32_t layer_named(const PyPlan& self, const std::string& name) {
  const auto at = std::find(self.names.begin(), self.names.end(), name);
  if (at == self.names.end()) {
    raise(Status(Code::kOutOfRange, "the plan has no layer '" + name + "'; see plan.layers"));
  }
  return static_cast<std::uint32_t>(at - self.names.begin());
}

std::uint32_t layer_numbered(const PyPlan& self, std::int64_t number) {
  const auto count = static_cast<std::int64_t>(self.names.size());
  if (number < -count || number >= count) {
    raise(Status(Code::kOutOfRange, "layer " + std::to_string(number) +
                                        " is out of range: the plan has " + std::to_string(count)));
  }
  return static_cast<std::uint32_t>(number < 0 ? number + count : number);
}

std::vector<std::uint32_t> parse_layers(const PyPlan& self, const py::object& layers) {
  std::vector<std::uint32_t> out;
  if (layers.is_none()) {
    out.resize(self.names.size());
    std::iota(out.begin(), out.end(), 0u);
    return out;
  }
  const std::vector<Index> parsed = parse_index(layers);
  if (parsed.size() != 1) throw py::type_error("layers= takes a list where there are several");
  const Index& index = parsed[0];
  if (const auto* number = std::get_if<std::int64_t>(&index)) {
    out.push_back(layer_numbered(self, *number));
  } else if (const auto* name = std::get_if<std::string>(&index)) {
    out.push_back(layer_named(self, *name));
  } else if (const auto* numbers = std::get_if<IndexList>(&index)) {
    for (const std::int64_t each : **numbers) out.push_back(layer_numbered(self, each));
  } else if (const auto* names = std::get_if<NameList>(&index)) {
    for (const std::string& each : *names) out.push_back(layer_named(self, each));
  } else if (std::holds_alternative<Slice>(index)) {
    Py_ssize_t start = 0, stop = 0, step = 0;
    if (PySlice_Unpack(layers.ptr(), &start, &stop, &step) != 0) throw py::error_already_set();
    const Py_ssize_t count =
        PySlice_AdjustIndices(static_cast<Py_ssize_t>(self.names.size()), &start, &stop, step);
    for (Py_ssize_t i = 0; i < count; ++i) {
      out.push_back(static_cast<std::uint32_t>(start + i * step));
    }
  } else {
    throw py::type_error("layers= takes a number, a name, a slice, or a list of numbers or names");
  }
  return out;
}

PyTransferPointer run(const PyPlan& self, Direction direction, const py::object& source_blocks,
                      const py::object& target_blocks, const py::object& layers,
                      const TransferArguments& arguments) {
  const IndexList source = parse_ids(source_blocks);
  const IndexList target = parse_ids(target_blocks);
  const std::vector<std::uint32_t> chosen = parse_layers(self, layers);
  const bool is_put = direction == Direction::kPut;
  const Plan::Blocks blocks{is_put ? *source : *target, is_put ? *target : *source, chosen};
  return move(self.owner, *self.plan, direction, blocks, arguments);
}

constexpr const char* kPlanDoc =
    "Checks and cuts two groups once, so that blocks of them can be moved again and again.\n\n"
    "source_group, target_group: one is local (a Region, its view, or a tensor), the other a\n"
    "    RemoteHandle or a part of one. Their tensors are paired in order: layers. Dtypes and shapes\n"
    "    must be equal but for the size of the block axis.\n"
    "block_axis: the axis that blocks are counted along, in every tensor.\n\n"
    "Returns a Plan. Raises LayoutMismatch, InvalidArgument where tensors of a side share bytes,\n"
    "OutOfRange, Unsupported where the block axis was indexed with a list.";

constexpr const char* kPutDoc =
    "Writes blocks of the local side into blocks of the remote one: block source_blocks[i] goes to\n"
    "target_blocks[i], in each of the layers, as one transfer.\n\n"
    "source_blocks, target_blocks: block ids, 0 or more; a NumPy array of int64 is\n"
    "    the quickest. No target block may be named twice.\n"
    "layers: a number, a name, a slice, or a list of numbers or names; None: all.\n\n"
    "Everything else as in put(). Returns a Transfer. Raises OutOfRange naming the entry,\n"
    "InvalidArgument, and what put() raises.";

constexpr const char* kGetDoc =
    "Reads blocks of the remote side into blocks of the local one: block source_blocks[i] of the\n"
    "remote side goes to target_blocks[i] here. Everything else as in Plan.put().";

auto block_arguments() {
  return std::tuple(py::arg("source_blocks"), py::arg("target_blocks"));
}
auto move_keywords() {
  return std::tuple(py::arg("layers") = py::none(), py::arg("after") = py::none(),
                    py::arg("notify") = py::none(), py::arg("label") = py::none(),
                    py::arg("deadline") = py::none(), py::arg("accept_timeout") = py::none(),
                    py::arg("queue") = py::none());
}

template <Direction direction>
PyTransferPointer move_blocks(const PyPlan& self, const py::object& source_blocks,
                              const py::object& target_blocks, const Layers& layers,
                              const py::object& after, const Tag& notify, const py::object& label,
                              const Seconds& deadline, const Seconds& accept_timeout,
                              const Queue& queue) {
  return run(self, direction, source_blocks, target_blocks, layers,
             {after, notify, label, deadline, accept_timeout, queue.value_or(nullptr)});
}

}  // namespace

void declare_plans(py::module_& module) {
  py::class_<PyPlan>(module, "Plan",
                     "Two groups of tensors that are made of blocks: see Engine.plan().\n\n"
                     "It keeps its memory alive. Any thread may use it.");
}

void bind_plans(py::module_& module) {
  auto plan = py::reinterpret_borrow<py::class_<PyPlan>>(module.attr("Plan"));
  define_quick(plan, "put", &move_blocks<Direction::kPut>, kPutDoc, block_arguments(),
               move_keywords());
  define_quick(plan, "get", &move_blocks<Direction::kGet>, kGetDoc, block_arguments(),
               move_keywords());
  plan
      .def_property_readonly(
          "layers", [](const PyPlan& self) { return self.names; },
          "Names of the tensors, in order, as the remote side has them; [''] for one alone.")
      .def_property_readonly(
          "local_blocks", [](const PyPlan& self) { return self.plan->local_blocks(); },
          "Blocks of each local tensor.")
      .def_property_readonly(
          "remote_blocks", [](const PyPlan& self) { return self.plan->remote_blocks(); },
          "Blocks of each remote tensor.")
      .def_property_readonly(
          "block_nbytes", [](const PyPlan& self) { return self.plan->block_nbytes(); },
          "Bytes of one block of all layers.")
      .def_property_readonly(
          "block_pieces", [](const PyPlan& self) { return self.plan->block_pieces(); },
          "Pieces that are contiguous on both sides, in one block of all layers.")
      .def("__repr__", [](const PyPlan& self) {
        return "<kvzc.Plan of " + std::to_string(self.names.size()) + " layers, " +
               std::to_string(self.plan->local_blocks()) + " local and " +
               std::to_string(self.plan->remote_blocks()) + " remote blocks of " +
               std::to_string(self.plan->block_nbytes()) + " bytes>";
      });
  py::reinterpret_borrow<py::object>(module.attr("Engine")).attr("plan") = py::cpp_function(
      &make_plan, py::name("plan"), py::is_method(module.attr("Engine")), py::arg("source_group"),
      py::arg("target_group"), py::kw_only(), py::arg("block_axis") = 0, kPlanDoc);
  module.def(
      "plan",
      [](const py::object& source, const py::object& target, std::int64_t block_axis) {
        return make_plan(default_engine(), source, target, block_axis);
      },
      py::arg("source_group"), py::arg("target_group"), py::kw_only(), py::arg("block_axis") = 0,
      kPlanDoc);
}

}  // namespace kvzc::bindings

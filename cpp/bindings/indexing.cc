// From what stands between the brackets to the core's indices.

#include <cstring>
#include <optional>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw py::type_error(text); }

std::int64_t as_integer(py::handle object) {
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  // Beyond 64 bits is beyond every shape.
  if (overflow != 0) return overflow > 0 ? INT64_MAX : INT64_MIN;
  return value;
}

std::optional<std::int64_t> as_bound(PyObject* object) {
  if (object == Py_None) return std::nullopt;
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(object));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  // Bounds beyond 64 bits mean the end, as they do for lists.
  if (overflow != 0) return overflow > 0 ? INT64_MAX : INT64_MIN;
  return value;
}

template <typename T>
void append(const char* data, std::int64_t count, std::int64_t stride,
            std::vector<std::int64_t>* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, data + i * stride, sizeof value);
    out->push_back(static_cast<std::int64_t>(value));
  }
}

// `kind` is 'i' or 'u'.
IndexList list_of(const char* data, std::int64_t count, std::int64_t stride, char kind,
                  std::int64_t item) {
  auto out = std::make_shared<std::vector<std::int64_t>>();
  out->reserve(static_cast<std::size_t>(count));
  const bool is_signed = kind == 'i';
  switch (item) {
    case 1:
      is_signed ? append<std::int8_t>(data, count, stride, out.get())
                : append<std::uint8_t>(data, count, stride, out.get());
      break;
    case 2:
      is_signed ? append<std::int16_t>(data, count, stride, out.get())
                : append<std::uint16_t>(data, count, stride, out.get());
      break;
    case 4:
      is_signed ? append<std::int32_t>(data, count, stride, out.get())
                : append<std::uint32_t>(data, count, stride, out.get());
      break;
    case 8:
      append<std::int64_t>(data, count, stride, out.get());
      // What does not fit into 63 bits is beyond every shape, not a position from the end.
      if (!is_signed) {
        for (std::int64_t& id : *out) id = id < 0 ? INT64_MAX : id;
      }
      break;
    default:
      refuse("an index array has an unusual integer type");
  }
  return out;
}

Index parse_array(const TensorSpec& spec) {
  const std::string name(dtype_name(spec.dtype));
  const bool is_signed = name.starts_with("int");
  if (!is_signed && !name.starts_with("uint")) {
    refuse("an index array holds integers, not " + name +
           (name == "bool" ? "; give the positions that a mask selects: mask.nonzero()" : ""));
  }
  if (spec.shape.size() != 1) {
    refuse("an index array has one axis, this one " + std::to_string(spec.shape.size()));
  }
  return list_of(reinterpret_cast<const char*>(spec.data), spec.shape[0], spec.strides_bytes[0],
                 is_signed ? 'i' : 'u', dtype_nbytes(spec.dtype));
}

Index parse_sequence(const py::sequence& sequence) {
  const std::size_t count = sequence.size();
  if (count > 0 && py::isinstance<py::str>(sequence[0])) {
    NameList names;
    for (const py::handle name : sequence) {
      if (!py::isinstance<py::str>(name)) refuse("a list of names holds names only");
      names.push_back(name.cast<std::string>());
    }
    return names;
  }
  auto ids = std::make_shared<std::vector<std::int64_t>>();
  ids->reserve(count);
  for (const py::handle id : sequence) {
    if (PyBool_Check(id.ptr()) != 0) {
      refuse("an index list holds integers, not bools; give the positions that a mask selects");
    }
    ids->push_back(as_integer(id));
  }
  return IndexList(std::move(ids));
}

Index parse_one(py::handle object) {
  PyObject* const raw = object.ptr();
  if (PyBool_Check(raw) != 0) refuse("a bool is not an index here");
  if (PyLong_Check(raw) != 0) return as_integer(object);
  if (PySlice_Check(raw) != 0) {
    const auto* slice = reinterpret_cast<PySliceObject*>(raw);
    return Slice{as_bound(slice->start), as_bound(slice->stop), as_bound(slice->step)};
  }
  if (raw == Py_Ellipsis) return Ellipsis{};
  if (py::isinstance<py::str>(object)) return object.cast<std::string>();
  if (PyList_Check(raw) != 0 || PyRange_Check(raw) != 0) {
    return parse_sequence(py::reinterpret_borrow<py::sequence>(object));
  }
  if (raw == Py_None) refuse("None (a new axis) is not an index here");
  if (is_torch_tensor(object)) {
    if (py::str(object.attr("device").attr("type")).cast<std::string>() != "cpu") {
      refuse(
          "an index on a device would have to be waited for; give block ids that are on the "
          "CPU");
    }
    if (object.attr("ndim").cast<int>() == 0) {
      if (describe(object).spec.dtype == DType::kBool) refuse("a bool is not an index here");
      return as_integer(object);
    }
    return parse_array(describe(object).spec);
  }
  if (PyObject_CheckBuffer(raw) != 0) {
    // NumPy's scalars have buffers too.
    if (PyIndex_Check(raw) != 0 && !py::hasattr(object, "__len__")) return as_integer(object);
    const Described array = describe(object);
    if (array.spec.shape.empty()) return as_integer(object);
    return parse_array(array.spec);
  }
  if (PyIndex_Check(raw) != 0) return as_integer(object);
  refuse(
      "indices are integers, slices, '...', lists or arrays of integers, and names in a group, "
      "not " +
      py::str(py::type::of(object)).cast<std::string>());
}

// Whether the buffer's elements are int64, as NumPy spells it.
bool is_int64(const Py_buffer& buffer) {
  if (buffer.format == nullptr || buffer.itemsize != 8) return false;
  const std::string_view format = buffer.format;
  return format == "l" || format == "q";
}

}  // namespace

IndexList parse_ids(py::handle object) {
  Py_buffer buffer;
  if (PyObject_CheckBuffer(object.ptr()) != 0 &&
      PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0) {
    IndexList out;
    if (buffer.ndim == 1 && is_int64(buffer)) {
      const auto* const data = static_cast<const std::int64_t*>(buffer.buf);
      out = std::make_shared<std::vector<std::int64_t>>(data, data + buffer.shape[0]);
    }
    PyBuffer_Release(&buffer);
    if (out) return out;
  }
  PyErr_Clear();  // What is strided is converted.
  const Index index = parse_one(object);
  if (const auto* list = std::get_if<IndexList>(&index)) return *list;
  refuse("block ids are a list or an array of integers, not " +
         py::str(py::type::of(object)).cast<std::string>());
}

std::vector<Index> parse_index(py::handle key) {
  std::vector<Index> out;
  if (PyTuple_Check(key.ptr()) == 0) {
    out.push_back(parse_one(key));
    return out;
  }
  const auto keys = py::reinterpret_borrow<py::tuple>(key);
  out.reserve(keys.size());
  for (const py::handle each : keys) out.push_back(parse_one(each));
  return out;
}

std::vector<std::int64_t> parse_dims(const py::args& dims) {
  const bool is_one_sequence =
      dims.size() == 1 && (PyTuple_Check(dims[0].ptr()) != 0 || PyList_Check(dims[0].ptr()) != 0);
  const py::object all = is_one_sequence ? py::object(dims[0]) : py::object(dims);
  std::vector<std::int64_t> out;
  for (const py::handle dim : all) out.push_back(as_integer(dim));
  return out;
}

}  // namespace kvzc::bindings

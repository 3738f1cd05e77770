// From torch tensors, NumPy arrays and buffers to TensorSpec; from sharable memory to tensors and
// arrays.

#include <pybind11/numpy.h>

#include <algorithm>
#include <optional>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

// Gives a module that the program has imported, or null.
py::handle imported(const char* name) {
  return PyDict_GetItemString(PyImport_GetModuleDict(), name);
}

constexpr const char* kReadOnly = "is read-only";

// --- torch ---

// Whether the object is a tensor and nothing more: subclasses may keep their elements elsewhere.
bool is_plain_tensor(py::handle tensor) {
  const py::handle type = py::type::handle_of(tensor);
  const py::handle torch = imported("torch");
  return type.is(torch.attr("Tensor")) || type.is(torch.attr("nn").attr("Parameter"));
}

// By attributes, which every torch and every subclass has; says why where it cannot.
TensorSpec read_torch(py::handle tensor) {
  if (!tensor.attr("layout").is(py::module_::import("torch").attr("strided"))) {
    refuse(Code::kUnsupported, "a tensor of layout " +
                                   py::str(tensor.attr("layout")).cast<std::string>() +
                                   " has no strides; kvzc moves dense, strided tensors");
  }
  const std::string device = py::str(tensor.attr("device").attr("type"));
  if (device == "meta") {
    refuse(Code::kInvalidArgument, "a meta tensor has no memory; make it on a real device first");
  }
  if (device != "cpu") {
    refuse(Code::kUnsupported,
           "this version of kvzc moves CPU tensors; the tensor is on '" + device + "'");
  }
  TensorSpec spec;
  spec.dtype = torch_dtype(tensor.attr("dtype"));
  const auto item = static_cast<std::int64_t>(spec.dtype.nbytes());
  for (const py::handle size : tensor.attr("shape"))
    spec.shape.push_back(size.cast<std::int64_t>());
  for (const py::handle stride : tensor.attr("stride")()) {
    spec.strides_bytes.push_back(stride.cast<std::int64_t>() * item);
  }
  spec.data = reinterpret_cast<std::byte*>(tensor.attr("data_ptr")().cast<std::uintptr_t>());
  return spec;
}

// Calls a method without arguments. `name` is interned, so that no text is made for every put.
py::object call(py::handle object, PyObject* name) {
  auto out = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), name));
  if (!out) throw py::error_already_set();
  return out;
}

Described describe_torch(py::handle tensor) {
  static PyObject* const is_conj = PyUnicode_InternFromString("is_conj");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const untyped_storage = PyUnicode_InternFromString("untyped_storage");
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  static PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
  Described out;
  TensorSpec& spec = out.spec;
  std::optional<TensorSpec> seen;
  if (is_plain_tensor(tensor)) seen = glance_at(tensor);
  spec = seen ? *std::move(seen) : read_torch(tensor);
  // The exchange API does not tell of these two.
  if (call(tensor, is_conj).is(py::handle(Py_True)) ||
      call(tensor, is_neg).is(py::handle(Py_True))) {
    refuse(Code::kInvalidArgument,
           "the tensor is a lazy conjugate or negative, its memory holds other numbers; call "
           "resolve_conj() or resolve_neg() first");
  }
  const py::object storage = call(tensor, untyped_storage);
  spec.storage_data = reinterpret_cast<std::byte*>(call(storage, data_ptr).cast<std::uintptr_t>());
  spec.storage_nbytes = call(storage, nbytes).cast<std::uint64_t>();
  // An empty tensor's address says nothing.
  if (spec.data == nullptr) spec.data = spec.storage_data;
  // The storage too: `tensor` may be given another one.
  spec.keep_alive = keep_alive(py::make_tuple(tensor, storage));
  return out;
}

// --- NumPy ---

// The lowest and the end of the bytes that an array touches.
std::pair<std::byte*, std::byte*> extent(std::byte* data, const std::vector<std::int64_t>& shape,
                                         const std::vector<std::int64_t>& strides_bytes,
                                         std::int64_t item) {
  std::byte* low = data;
  std::byte* high = data + item;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return {data, data};
    (strides_bytes[i] < 0 ? low : high) += (shape[i] - 1) * strides_bytes[i];
  }
  return {low, high};
}

// By the array's own structure: its attributes are Python objects that cost microseconds.
struct ArrayLayout {
  std::byte* data;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides_bytes;
};

ArrayLayout read_layout(const py::array& array) {
  const auto ndim = array.ndim();
  return {static_cast<std::byte*>(const_cast<void*>(array.data())),
          {array.shape(), array.shape() + ndim},
          {array.strides(), array.strides() + ndim}};
}

Described describe_numpy(py::handle object) {
  const auto array = py::reinterpret_borrow<py::array>(object);
  Described out;
  TensorSpec& spec = out.spec;
  spec.dtype = numpy_dtype(array.dtype());
  ArrayLayout layout = read_layout(array);
  spec.data = layout.data;
  spec.shape = std::move(layout.shape);
  spec.strides_bytes = std::move(layout.strides_bytes);
  if (!array.writeable()) out.read_only = kReadOnly;
  const auto item = static_cast<std::int64_t>(dtype_nbytes(spec.dtype));
  auto [low, high] = extent(spec.data, spec.shape, spec.strides_bytes, item);
  // The storage is that of the array which all views go back to.
  py::array root = array;
  for (py::object base = root.base(); base && is_instance_of(base, "numpy", "ndarray");
       base = root.base()) {
    root = py::reinterpret_borrow<py::array>(base);
  }
  if (!root.is(array)) {
    const ArrayLayout whole = read_layout(root);
    const auto [root_low, root_high] = extent(whole.data, whole.shape, whole.strides_bytes,
                                              static_cast<std::int64_t>(root.itemsize()));
    if (root_low <= low && high <= root_high) {
      low = root_low;
      high = root_high;
    }
  }
  spec.storage_data = low;
  spec.storage_nbytes = static_cast<std::uint64_t>(high - low);
  spec.keep_alive = keep_alive(array);
  return out;
}

// --- Buffers ---

Described describe_buffer(py::handle object) {
  // The view holds the export, so that a bytearray cannot move while it is used.
  const auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(object.ptr()));
  if (!view) throw py::error_already_set();
  const Py_buffer& buffer = *PyMemoryView_GET_BUFFER(view.ptr());
  Described out;
  TensorSpec& spec = out.spec;
  const auto item = static_cast<std::size_t>(buffer.itemsize);
  const auto dtype = buffer_dtype(buffer.format, item);
  if (!dtype || buffer.suboffsets != nullptr) {
    refuse(Code::kUnsupported, std::string("kvzc does not move buffers of format '") +
                                   (buffer.format == nullptr ? "B" : buffer.format) +
                                   "'; cast it with memoryview(...).cast('B')");
  }
  spec.dtype = *dtype;
  spec.data = static_cast<std::byte*>(buffer.buf);
  for (int i = 0; i < buffer.ndim; ++i) {
    spec.shape.push_back(buffer.shape[i]);
    spec.strides_bytes.push_back(buffer.strides[i]);
  }
  const auto [low, high] =
      extent(spec.data, spec.shape, spec.strides_bytes, static_cast<std::int64_t>(item));
  spec.storage_data = low;
  spec.storage_nbytes = static_cast<std::uint64_t>(high - low);
  spec.keep_alive = keep_alive(view);
  if (buffer.readonly != 0) out.read_only = kReadOnly;
  return out;
}

// --- kvzc.Memory ---

Described describe_memory(py::handle object) {
  const auto& memory = object.cast<const RawMemory&>();
  Described out;
  TensorSpec& spec = out.spec;
  spec.dtype = DType::kUint8;
  spec.data = spec.storage_data = reinterpret_cast<std::byte*>(memory.address);
  spec.storage_nbytes = memory.nbytes;
  spec.shape.push_back(static_cast<std::int64_t>(memory.nbytes));
  spec.strides_bytes.push_back(1);
  spec.keep_alive = keep_alive(py::reinterpret_borrow<py::object>(object));
  if (!memory.is_writable) out.read_only = kReadOnly;
  return out;
}

// Sharable memory as a Python buffer; tensors and arrays made of it keep it alive.
struct SharedBuffer {
  std::shared_ptr<SharedAllocation> allocation;
};

}  // namespace

void refuse(Code code, const std::string& text) { raise(Status(code, text)); }

bool is_instance_of(py::handle object, const char* module_name, const char* class_name) {
  const py::handle module = imported(module_name);
  if (!module || !py::hasattr(module, class_name)) return false;
  return py::isinstance(object, module.attr(class_name));
}

bool is_torch_tensor(py::handle object) { return is_instance_of(object, "torch", "Tensor"); }

Described describe(py::handle object) {
  if (is_torch_tensor(object)) return describe_torch(object);
  if (is_instance_of(object, "numpy", "ndarray")) return describe_numpy(object);
  // Before buffers, which know fewer dtypes.
  if (is_dlpack_producer(object)) return describe_dlpack(object);
  if (PyObject_CheckBuffer(object.ptr()) != 0) return describe_buffer(object);
  if (py::isinstance<RawMemory>(object)) return describe_memory(object);
  throw py::type_error("kvzc moves torch tensors, NumPy arrays, DLPack tensors, buffers and kvzc.Memory, not " +
                       py::str(py::type::of(object)).cast<std::string>());
}

py::object make_empty(SharedAllocator& allocator, py::handle shape, py::handle dtype,
                      const std::string& device) {
  if (device != "cpu") {
    refuse(Code::kUnsupported, "this version of kvzc allocates on 'cpu', not on '" + device + "'");
  }
  const py::tuple extents = PyIndex_Check(shape.ptr()) != 0
                                ? py::make_tuple(shape)
                                : py::tuple(py::reinterpret_borrow<py::object>(shape));
  const bool is_torch = is_instance_of(dtype, "torch", "dtype");
  const py::object element = is_torch ? py::reinterpret_borrow<py::object>(dtype)
                                      : py::module_::import("numpy").attr("dtype")(dtype);
  const DType known = is_torch ? torch_dtype(element) : numpy_dtype(element);
  std::uint64_t nbytes = dtype_nbytes(known);
  py::ssize_t count = 1;
  for (const py::handle extent : extents) {
    const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(extent.ptr()));
    if (!number) throw py::error_already_set();
    int overflow = 0;
    const std::int64_t size = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (size < 0 && overflow <= 0) throw py::value_error("a shape has no negative extents");
    if (overflow > 0) refuse(Code::kLimitExceeded, "the shape has more than 2**63 bytes");
    if (__builtin_mul_overflow(nbytes, static_cast<std::uint64_t>(size), &nbytes) ||
        nbytes > INT64_MAX) {
      refuse(Code::kLimitExceeded, "the shape has more than 2**63 bytes");
    }
    count *= size;
  }
  std::shared_ptr<SharedAllocation> allocation;
  {
    Result<std::shared_ptr<SharedAllocation>> made = [&] {
      const GilRelease release;  // Zeroing large memory takes a while.
      return allocator.allocate(nbytes);
    }();
    allocation = take(std::move(made));
  }
  const py::object buffer = py::cast(SharedBuffer{std::move(allocation)});
  const py::object module = py::module_::import(is_torch ? "torch" : "numpy");
  return module.attr("frombuffer")(buffer, py::arg("dtype") = element, py::arg("count") = count)
      .attr("reshape")(extents);
}

void bind_tensors(py::module_& module) {
  py::class_<SharedBuffer>(module, "_SharedBuffer", py::buffer_protocol(),
                           "Memory that other processes can map; what empty() builds on.")
      .def_buffer([](SharedBuffer& self) {
        return py::buffer_info(self.allocation->data(), 1, "B",
                               static_cast<py::ssize_t>(self.allocation->nbytes()));
      });
}

}  // namespace kvzc::bindings

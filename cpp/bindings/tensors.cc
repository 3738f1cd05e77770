// From tensors, arrays and buffers to TensorSpec, and from sharable memory to tensors and arrays.

#include <algorithm>
#include <optional>
#include <string_view>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

// Gives a module only if the program has imported it: kvzc itself imports neither torch nor NumPy
// to look at an object.
py::object imported(const char* name) {
  const py::dict modules = py::module_::import("sys").attr("modules");
  return modules.contains(name) ? modules[name].cast<py::object>() : py::none();
}

bool is_instance_of(py::handle object, const char* module_name, const char* class_name) {
  // The type's own module is a cheap first look; subclasses pass through the second.
  const py::object module = imported(module_name);
  if (module.is_none() || !py::hasattr(module, class_name)) return false;
  return py::isinstance(object, module.attr(class_name));
}

[[noreturn]] void refuse(Code code, const std::string& text) { raise(Status(code, text)); }

// --- torch ---

DType torch_dtype(py::handle dtype) {
  // "torch.float32"
  const std::string text = py::str(dtype);
  const std::string name = text.substr(text.rfind('.') + 1);
  if (const auto known = dtype_from_name(name)) return *known;
  refuse(Code::kUnsupported,
         "kvzc does not move tensors of dtype " + text + "; view it as torch.uint8 on both sides");
}

Described describe_torch(py::handle tensor) {
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
  if (tensor.attr("is_conj")().cast<bool>() || tensor.attr("is_neg")().cast<bool>()) {
    refuse(Code::kInvalidArgument,
           "the tensor is a lazy conjugate or negative, its memory holds other numbers; call "
           "resolve_conj() or resolve_neg() first");
  }
  Described out;
  TensorSpec& spec = out.spec;
  spec.dtype = torch_dtype(tensor.attr("dtype"));
  const auto item = static_cast<std::int64_t>(dtype_nbytes(spec.dtype));
  for (const py::handle size : tensor.attr("shape"))
    spec.shape.push_back(size.cast<std::int64_t>());
  for (const py::handle stride : tensor.attr("stride")()) {
    spec.strides_bytes.push_back(stride.cast<std::int64_t>() * item);
  }
  const py::object storage = tensor.attr("untyped_storage")();
  spec.data = reinterpret_cast<std::byte*>(tensor.attr("data_ptr")().cast<std::uintptr_t>());
  spec.storage_data =
      reinterpret_cast<std::byte*>(storage.attr("data_ptr")().cast<std::uintptr_t>());
  spec.storage_nbytes = storage.attr("nbytes")().cast<std::uint64_t>();
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

DType numpy_dtype(py::handle dtype) {
  const std::string name = py::str(dtype.attr("name"));
  const auto known = dtype_from_name(name);
  if (!known) {
    refuse(Code::kUnsupported,
           "kvzc does not move arrays of dtype " + name + "; view it as numpy.uint8 on both sides");
  }
  // ml_dtypes' types have no byte order to speak of.
  const std::string order = py::str(dtype.attr("byteorder"));
  if (order == (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? ">" : "<")) {
    refuse(Code::kUnsupported,
           "the array's byte order is not this machine's; convert it with "
           "array.astype(array.dtype.newbyteorder('='))");
  }
  return *known;
}

void read_layout(py::handle array, std::vector<std::int64_t>* shape,
                 std::vector<std::int64_t>* strides_bytes, std::byte** data, bool* is_read_only) {
  for (const py::handle size : array.attr("shape")) shape->push_back(size.cast<std::int64_t>());
  for (const py::handle stride : array.attr("strides")) {
    strides_bytes->push_back(stride.cast<std::int64_t>());
  }
  const py::tuple where = array.attr("__array_interface__")["data"];
  *data = reinterpret_cast<std::byte*>(where[0].cast<std::uintptr_t>());
  *is_read_only = where[1].cast<bool>();
}

Described describe_numpy(py::handle array) {
  Described out;
  TensorSpec& spec = out.spec;
  spec.dtype = numpy_dtype(array.attr("dtype"));
  read_layout(array, &spec.shape, &spec.strides_bytes, &spec.data, &out.is_read_only);
  const auto item = static_cast<std::int64_t>(dtype_nbytes(spec.dtype));
  auto [low, high] = extent(spec.data, spec.shape, spec.strides_bytes, item);
  // The storage is that of the array which all views go back to.
  py::object root = py::reinterpret_borrow<py::object>(array);
  while (is_instance_of(root.attr("base"), "numpy", "ndarray")) root = root.attr("base");
  if (!root.is(array)) {
    std::vector<std::int64_t> shape, strides;
    std::byte* data = nullptr;
    bool is_read_only = false;
    read_layout(root, &shape, &strides, &data, &is_read_only);
    const auto [root_low, root_high] =
        extent(data, shape, strides, root.attr("itemsize").cast<std::int64_t>());
    if (root_low <= low && high <= root_high) {
      low = root_low;
      high = root_high;
    }
  }
  spec.storage_data = low;
  spec.storage_nbytes = static_cast<std::uint64_t>(high - low);
  spec.keep_alive = keep_alive(py::reinterpret_borrow<py::object>(array));
  return out;
}

// --- Buffers ---

std::optional<DType> buffer_dtype(const char* format, std::size_t item) {
  const std::string text = format == nullptr ? "B" : format;
  constexpr std::string_view kNative =
      __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? std::string_view("@=<") : std::string_view("@=>");
  const char kind = text.size() == 2 && kNative.find(text[0]) != kNative.npos ? text[1] : text[0];
  if (text.size() > 2 || (text.size() == 2 && kind == text[0])) return std::nullopt;
  const auto sized = [item](DType one, DType two, DType four, DType eight) -> std::optional<DType> {
    switch (item) {
      case 1:
        return one;
      case 2:
        return two;
      case 4:
        return four;
      case 8:
        return eight;
      default:
        return std::nullopt;
    }
  };
  switch (kind) {
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
    case 'n':
      return sized(DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64);
    case 'B':
    case 'c':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N':
      return sized(DType::kUint8, DType::kUint16, DType::kUint32, DType::kUint64);
    case '?':
      return DType::kBool;
    case 'e':
      return DType::kFloat16;
    case 'f':
      return DType::kFloat32;
    case 'd':
      return DType::kFloat64;
    default:
      return std::nullopt;
  }
}

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
  out.is_read_only = buffer.readonly != 0;
  return out;
}

// Sharable memory as a Python buffer; tensors and arrays made of it keep it alive.
struct SharedBuffer {
  std::shared_ptr<SharedAllocation> allocation;
};

}  // namespace

bool is_torch_tensor(py::handle object) { return is_instance_of(object, "torch", "Tensor"); }

Described describe(py::handle object) {
  if (is_torch_tensor(object)) return describe_torch(object);
  if (is_instance_of(object, "numpy", "ndarray")) return describe_numpy(object);
  if (PyObject_CheckBuffer(object.ptr()) != 0) return describe_buffer(object);
  throw py::type_error("kvzc moves torch tensors, NumPy arrays and buffers, not " +
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

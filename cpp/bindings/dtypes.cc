// From the element types of torch, NumPy and buffers to DType.

#include <pybind11/numpy.h>

#include <optional>
#include <string_view>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

constexpr bool kIsLittleEndian = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

bool is_foreign_order(char byteorder) { return byteorder == (kIsLittleEndian ? '>' : '<'); }

bool is_plain_void(py::handle dtype) {
  return dtype.attr("type").is(py::module_::import("numpy").attr("void"));
}

// Says whether a NumPy type without fields is a row of bytes with a meaning that its text gives.
bool is_described_by_its_text(py::handle dtype) {
  const std::string kind = py::str(dtype.attr("kind"));
  return kind == "S" || kind == "U" || kind == "m" || kind == "M" || is_plain_void(dtype);
}

[[noreturn]] void refuse_numpy(py::handle dtype) {
  const std::string name = py::str(dtype.attr("name"));
  if (dtype.attr("hasobject").cast<bool>()) {
    refuse(Code::kUnsupported,
           "elements of dtype " + name +
               " hold addresses of this process, which mean nothing in another");
  }
  // As ml_dtypes has them. Others pack two or four into a byte.
  const bool is_small = name.starts_with("int") || name.starts_with("uint") ||
                        name.starts_with("float4") || name.starts_with("float6");
  refuse(Code::kUnsupported,
         "kvzc does not move arrays of dtype " + name +
             (is_small ? ", of which NumPy keeps one per byte and others several" : "") +
             "; view it as numpy.uint8 on both sides");
}

// A number of NumPy's own, in this machine's byte order, without asking Python for its name.
std::optional<DType> builtin_dtype(const py::dtype& dtype) {
  constexpr int kBuiltinTypes = 24;
  if (dtype.num() >= kBuiltinTypes || is_foreign_order(dtype.byteorder())) return std::nullopt;
  const std::string bits = std::to_string(8 * dtype.itemsize());
  switch (dtype.kind()) {
    case 'b':
      return DType::kBool;
    case 'i':
      return dtype_from_name("int" + bits);
    case 'u':
      return dtype_from_name("uint" + bits);
    case 'f':
      return dtype_from_name("float" + bits);
    case 'c':
      return dtype_from_name("complex" + bits);
    default:
      return std::nullopt;
  }
}

// What makes two NumPy types the same bytes with the same meaning: names, types and offsets of the
// fields, and the size; not titles, alignment or metadata. cpp/WIRE.md relies on it.
std::string numpy_description(py::handle dtype) {
  const py::object names = dtype.attr("names");
  if (!names.is_none()) {
    std::string out = "{";
    for (const py::handle name : names) {
      const py::tuple field = dtype.attr("fields")[name];
      const auto text = name.cast<std::string>();
      // With its length, so that no name reads as something else.
      out += std::to_string(text.size()) + ":" + text + "@" +
             std::to_string(field[1].cast<std::int64_t>()) + "=" + numpy_description(field[0]) +
             ",";
    }
    return out + "}" + std::to_string(dtype.attr("itemsize").cast<std::int64_t>());
  }
  const py::object subtype = dtype.attr("subdtype");
  if (!subtype.is_none()) {
    const auto both = subtype.cast<py::tuple>();
    return py::str(both[1]).cast<std::string>() + numpy_description(both[0]);
  }
  const std::string name = py::str(dtype.attr("name"));
  const char order = py::reinterpret_borrow<py::dtype>(dtype).byteorder();
  if (dtype_from_name(name)) {
    return (is_foreign_order(order) == kIsLittleEndian ? ">" : "<") + name;
  }
  if (is_described_by_its_text(dtype)) return py::str(dtype.attr("str"));
  refuse_numpy(dtype);
}

}  // namespace

DType torch_dtype(py::handle dtype) {
  // "torch.float32"
  const std::string text = py::str(dtype);
  const std::string name = text.substr(text.rfind('.') + 1);
  if (const auto known = dtype_from_name(name)) return *known;
  refuse(Code::kUnsupported,
         "kvzc does not move tensors of dtype " + text + "; view it as torch.uint8 on both sides");
}

DType numpy_dtype(py::handle dtype) {
  if (const auto known = builtin_dtype(py::reinterpret_borrow<py::dtype>(dtype))) return *known;
  const std::string name = py::str(dtype.attr("name"));
  const auto known = dtype_from_name(name);
  const bool is_structured = !dtype.attr("names").is_none();
  if (!known && !is_structured && !is_described_by_its_text(dtype)) refuse_numpy(dtype);
  // ml_dtypes' types have no byte order to speak of.
  if (is_foreign_order(py::reinterpret_borrow<py::dtype>(dtype).byteorder())) {
    refuse(Code::kUnsupported,
           "the array's byte order is not this machine's; convert it with "
           "array.astype(array.dtype.newbyteorder('='))");
  }
  if (known) return *known;
  return take(record_dtype(dtype.attr("itemsize").cast<std::uint32_t>(), numpy_description(dtype)));
}

DType dtype_of(py::handle dtype) {
  if (is_instance_of(dtype, "torch", "dtype")) return torch_dtype(dtype);
  if (py::isinstance<py::str>(dtype)) {
    if (const auto known = dtype_from_name(dtype.cast<std::string>())) return *known;
  }
  if (dtype.is_none()) throw py::type_error("None is no dtype");  // To NumPy it is float64.
  return numpy_dtype(py::module_::import("numpy").attr("dtype")(dtype));
}

std::optional<DType> buffer_dtype(const char* format, std::size_t item) {
  const std::string text = format == nullptr ? "B" : format;
  constexpr std::string_view kNative = kIsLittleEndian ? "@=<" : "@=>";
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

}  // namespace kvzc::bindings

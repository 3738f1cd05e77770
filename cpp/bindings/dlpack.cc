// Tensors of other libraries, by DLPack.

#include <algorithm>
#include <optional>

#include "bindings.h"
#include "dlpack_abi.h"

namespace kvzc::bindings {
namespace {

using dlpack::ExchangeApi;
using dlpack::ManagedTensor;
using dlpack::ManagedTensorVersioned;

std::optional<DType> dtype_of_code(dlpack::DataType type) {
  if (type.code == dlpack::kFloat4E2m1fn && type.bits == 4 && type.lanes == 2) {
    return DType::kFloat4E2m1fnX2;
  }
  if (type.lanes != 1) return std::nullopt;
  const auto of_8_bits = [type](DType dtype) {
    return type.bits == 8 ? std::optional(dtype) : std::nullopt;
  };
  switch (type.code) {
    case dlpack::kInt:
    case dlpack::kUint:
    case dlpack::kFloat:
    case dlpack::kBfloat:
    case dlpack::kComplex: {
      const char* const kinds[] = {"int", "uint", "float", "", "bfloat", "complex"};
      return dtype_from_name(kinds[type.code] + std::to_string(type.bits));
    }
    case dlpack::kBool:
      return of_8_bits(DType::kBool);
    case dlpack::kFloat8E3m4:
      return of_8_bits(DType::kFloat8E3m4);
    case dlpack::kFloat8E4m3:
      return of_8_bits(DType::kFloat8E4m3);
    case dlpack::kFloat8E4m3b11fnuz:
      return of_8_bits(DType::kFloat8E4m3b11fnuz);
    case dlpack::kFloat8E4m3fn:
      return of_8_bits(DType::kFloat8E4m3fn);
    case dlpack::kFloat8E4m3fnuz:
      return of_8_bits(DType::kFloat8E4m3fnuz);
    case dlpack::kFloat8E5m2:
      return of_8_bits(DType::kFloat8E5m2);
    case dlpack::kFloat8E5m2fnuz:
      return of_8_bits(DType::kFloat8E5m2fnuz);
    case dlpack::kFloat8E8m0fnu:
      return of_8_bits(DType::kFloat8E8m0fnu);
    default:
      return std::nullopt;
  }
}

void check_device(std::int32_t type) {
  if (type == dlpack::kCpu) return;
  refuse(Code::kUnsupported,
         "this version of kvzc moves CPU tensors; the tensor is on a device of DLPack's type " +
             std::to_string(type));
}

// Describes all but what keeps the memory alive.
TensorSpec spec_of(const dlpack::Tensor& tensor) {
  check_device(tensor.device.type);
  const auto dtype = dtype_of_code(tensor.dtype);
  if (!dtype) {
    refuse(Code::kUnsupported, "kvzc does not move elements of DLPack's type code " +
                                   std::to_string(tensor.dtype.code) + " with " +
                                   std::to_string(tensor.dtype.bits) + " bits in " +
                                   std::to_string(tensor.dtype.lanes) +
                                   " lanes; give them as bytes (uint8) on both sides");
  }
  const auto damaged = [](const char* what) {
    refuse(Code::kInvalidArgument, std::string("the DLPack tensor ") + what);
  };
  TensorSpec out;
  out.dtype = *dtype;
  const auto item = static_cast<std::int64_t>(dtype->nbytes());
  if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) damaged("has no shape");
  const auto count = static_cast<std::size_t>(tensor.ndim);
  out.shape.assign(tensor.shape, tensor.shape + count);
  out.strides_bytes.resize(count);
  std::int64_t contiguous = item;
  for (std::size_t i = count; i-- > 0;) {
    if (tensor.strides == nullptr) {
      out.strides_bytes[i] = contiguous;
    } else if (__builtin_mul_overflow(tensor.strides[i], item, &out.strides_bytes[i])) {
      damaged("has strides that do not fit into 64 bits");
    }
    const std::int64_t size = std::max<std::int64_t>(out.shape[i], 1);
    if (__builtin_mul_overflow(contiguous, size, &contiguous)) {
      damaged("has extents that do not fit into 64 bits");
    }
  }
  TensorView view;
  view.dtype = out.dtype;
  for (std::size_t i = 0; i < count; ++i) {
    view.axes.push_back({out.shape[i], out.strides_bytes[i], nullptr});
  }
  const Extent extent = take(extent_of(view));
  out.data = static_cast<std::byte*>(tensor.data);
  if (out.data == nullptr && extent.end != extent.begin) damaged("has no address");
  if (out.data != nullptr) out.data += tensor.byte_offset;
  // How large the storage is around it, DLPack does not say.
  out.storage_data = out.data;
  if (out.data != nullptr) out.storage_data += extent.begin;
  out.storage_nbytes = static_cast<std::uint64_t>(extent.end - extent.begin);
  return out;
}

// The producer gets its tensor back when the capsule goes, with the GIL and before the interpreter
// ends: its deleter may be Python code.
template <typename Managed>
py::object give_back_later(Managed* managed) {
  return py::capsule(static_cast<const void*>(managed), [](void* pointer) {
    auto* const self = static_cast<Managed*>(pointer);
    if (self->deleter != nullptr) self->deleter(self);
  });
}

Described describe_managed(ManagedTensorVersioned* managed) {
  py::object owner = give_back_later(managed);
  if (managed->version.major != dlpack::kMajorVersion) {
    refuse(Code::kUnsupported, "the tensor comes as DLPack version " +
                                   std::to_string(managed->version.major) +
                                   ", kvzc reads version 1; update kvzc");
  }
  if ((managed->flags & dlpack::kIsCopied) != 0) {
    refuse(Code::kUnsupported,
           "the tensor's library gave a copy of it, so kvzc would move other memory; make a "
           "contiguous CPU tensor of it first");
  }
  if ((managed->flags & dlpack::kIsPadded) != 0) {
    refuse(Code::kUnsupported,
           "elements smaller than a byte are moved packed, not padded to bytes; give them as "
           "bytes (uint8) on both sides");
  }
  Described out;
  out.spec = spec_of(managed->tensor);
  out.spec.keep_alive = keep_alive(std::move(owner));
  if ((managed->flags & dlpack::kReadOnly) != 0) out.read_only = "is read-only";
  return out;
}

Described describe_managed(ManagedTensor* managed) {
  py::object owner = give_back_later(managed);
  Described out;
  out.spec = spec_of(managed->tensor);
  out.spec.keep_alive = keep_alive(std::move(owner));
  out.read_only =
      "may be read-only: its library gives unversioned DLPack, which does not say whether it is";
  return out;
}

// Gives the exchange API that a type offers in the version that kvzc reads, or null.
const ExchangeApi* exchange_api(py::handle object) {
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  const py::object capsule = py::getattr(py::type::handle_of(object), name, py::none());
  constexpr const char* kCapsule = "dlpack_exchange_api";
  if (PyCapsule_IsValid(capsule.ptr(), kCapsule) == 0) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  while (api != nullptr && api->version.major > dlpack::kMajorVersion) api = api->older;
  return api != nullptr && api->version.major == dlpack::kMajorVersion ? api : nullptr;
}

// Takes what the capsule holds, if it is named so.
template <typename Managed>
Managed* consume(const py::object& capsule, const char* name, const char* used_name) {
  if (PyCapsule_IsValid(capsule.ptr(), name) == 0) return nullptr;
  auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (PyCapsule_SetName(capsule.ptr(), used_name) != 0) throw py::error_already_set();
  return managed;
}

py::object capsule_of(py::handle object) {
  try {
    return object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0),
                                     py::arg("copy") = false);
  } catch (py::error_already_set& error) {
    // Libraries from before DLPack 1.0 know neither argument.
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return object.attr("__dlpack__")();
}

}  // namespace

bool is_dlpack_producer(py::handle object) {
  return exchange_api(object) != nullptr ||
         (py::hasattr(object, "__dlpack__") && py::hasattr(object, "__dlpack_device__"));
}

Described describe_dlpack(py::handle object) {
  if (const ExchangeApi* api = exchange_api(object)) {
    ManagedTensorVersioned* managed = nullptr;
    if (api->managed_tensor_of(object.ptr(), &managed) != 0 || managed == nullptr) {
      if (PyErr_Occurred() != nullptr) throw py::error_already_set();
      refuse(Code::kUnsupported, "the library of " +
                                     py::str(py::type::of(object)).cast<std::string>() +
                                     " gave no DLPack tensor and no reason");
    }
    return describe_managed(managed);
  }
  // Asked first: a tensor elsewhere would be refused by its library, in its own words.
  const py::tuple device = object.attr("__dlpack_device__")();
  check_device(device[0].cast<std::int32_t>());
  const py::object capsule = capsule_of(object);
  if (auto* managed = consume<ManagedTensorVersioned>(capsule, "dltensor_versioned",
                                                      "used_dltensor_versioned")) {
    return describe_managed(managed);
  }
  if (auto* managed = consume<ManagedTensor>(capsule, "dltensor", "used_dltensor")) {
    return describe_managed(managed);
  }
  throw py::type_error("__dlpack__() of " + py::str(py::type::of(object)).cast<std::string>() +
                       " gave no DLPack capsule that was not used yet");
}

std::optional<TensorSpec> glance_at(py::handle object) {
  const ExchangeApi* const api = exchange_api(object);
  if (api == nullptr || api->tensor_of == nullptr) return std::nullopt;
  dlpack::Tensor tensor;
  if (api->tensor_of(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (tensor.device.type != dlpack::kCpu || !dtype_of_code(tensor.dtype)) return std::nullopt;
  return spec_of(tensor);
}

}  // namespace kvzc::bindings

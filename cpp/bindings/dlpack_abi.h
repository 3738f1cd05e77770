// The part of DLPack's C interface that kvzc reads, as dlpack.h 1.3 lays it out: structures that
// cross library boundaries, so their names and order are not ours.
#pragma once

#include <cstdint>

namespace kvzc::bindings::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;  // Another one lays structures out otherwise.
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::uint64_t kReadOnly = 1;
inline constexpr std::uint64_t kIsCopied = 2;
inline constexpr std::uint64_t kIsPadded = 4;  // Of types smaller than a byte.

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUint = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E3m4 = 7,
  kFloat8E4m3 = 8,
  kFloat8E4m3b11fnuz = 9,
  kFloat8E4m3fn = 10,
  kFloat8E4m3fnuz = 11,
  kFloat8E5m2 = 12,
  kFloat8E5m2fnuz = 13,
  kFloat8E8m0fnu = 14,
  kFloat4E2m1fn = 17
};

struct Version {
  std::uint32_t major, minor;
};

struct Device {
  std::int32_t type, id;
};

struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // In elements. Null before 1.2: contiguous.
  std::uint64_t byte_offset;
};

struct ManagedTensor {  // Unversioned: before 1.0.
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};

struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned* self);
  std::uint64_t flags;
  Tensor tensor;
};

// What a tensor type offers as its attribute __dlpack_c_exchange_api__, a capsule named
// "dlpack_exchange_api". Its functions give 0, or -1 with a Python error set.
struct ExchangeApi {
  Version version;
  const ExchangeApi* older;  // For consumers of an earlier major version.
  void* allocate;
  int (*managed_tensor_of)(void* object, ManagedTensorVersioned** out);
  void* object_of;
  int (*tensor_of)(void* object, Tensor* out);  // Borrows. Null where there is no such thing.
  void* current_stream;
};

static_assert(sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64 &&
              sizeof(ManagedTensorVersioned) == 80 && sizeof(ExchangeApi) == 56);

}  // namespace kvzc::bindings::dlpack

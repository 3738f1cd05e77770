// Views: which bytes of some memory an operation touches, and how two views pair into runs.
//
// A view is a value without memory behind it: element types, extents, byte strides. The same
// indexing makes local and remote views. A view that exists lies within its storage: bounds are
// checked where it is made and never again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kvzc/status.h"
#include "kvzc/transport.h"

namespace kvzc {

// X(enumerator, name as in torch and ml_dtypes, bytes). The order is the wire's: append, never
// reorder.
#define KVZC_DTYPES(X)                         \
  X(kUint8, uint8, 1)                          \
  X(kInt8, int8, 1)                            \
  X(kBool, bool, 1)                            \
  X(kInt16, int16, 2)                          \
  X(kUint16, uint16, 2)                        \
  X(kInt32, int32, 4)                          \
  X(kUint32, uint32, 4)                        \
  X(kInt64, int64, 8)                          \
  X(kUint64, uint64, 8)                        \
  X(kFloat16, float16, 2)                      \
  X(kBfloat16, bfloat16, 2)                    \
  X(kFloat32, float32, 4)                      \
  X(kFloat64, float64, 8)                      \
  X(kComplex64, complex64, 8)                  \
  X(kComplex128, complex128, 16)               \
  X(kFloat8E4m3fn, float8_e4m3fn, 1)           \
  X(kFloat8E5m2, float8_e5m2, 1)               \
  X(kFloat8E4m3fnuz, float8_e4m3fnuz, 1)       \
  X(kFloat8E5m2fnuz, float8_e5m2fnuz, 1)       \
  X(kFloat8E8m0fnu, float8_e8m0fnu, 1)         \
  X(kComplex32, complex32, 4)                  \
  X(kFloat8E3m4, float8_e3m4, 1)               \
  X(kFloat8E4m3, float8_e4m3, 1)               \
  X(kFloat8E4m3b11fnuz, float8_e4m3b11fnuz, 1) \
  X(kFloat4E2m1fnX2, float4_e2m1fn_x2, 1)

// What an element is. Bytes move as they are, so two sides need the same type, nothing more. Besides
// the types above there are records: elements of any size, told apart by a fingerprint of their
// description.
class DType {
 public:
  enum Number : std::uint8_t {
#define KVZC_ENUM(code, name, nbytes) code,
    KVZC_DTYPES(KVZC_ENUM)
#undef KVZC_ENUM
    kRecord = 255
  };

  // Requires: not kRecord.
  constexpr DType(Number number = kUint8) : nbytes_(kNbytes[number]), number_(number) {}
  constexpr DType(std::uint32_t record_nbytes, std::uint64_t fingerprint)
      : fingerprint_(fingerprint), nbytes_(record_nbytes), number_(kRecord) {}

  constexpr Number number() const { return number_; }
  constexpr std::uint32_t nbytes() const { return nbytes_; }
  constexpr std::uint64_t fingerprint() const { return fingerprint_; }  // 0 unless a record.
  constexpr bool is_record() const { return number_ == kRecord; }
  friend constexpr bool operator==(const DType&, const DType&) = default;

 private:
  static constexpr std::uint32_t kNbytes[] = {
#define KVZC_NBYTES(code, name, nbytes) nbytes,
      KVZC_DTYPES(KVZC_NBYTES)
#undef KVZC_NBYTES
  };

  std::uint64_t fingerprint_ = 0;
  std::uint32_t nbytes_;
  Number number_;
};

// Gives the record of `nbytes` that `description` describes: same text, same type.
// Errors: kInvalidArgument for 0 bytes.
Result<DType> record_dtype(std::uint32_t nbytes, std::string_view description);

// "float32", and for records "record24-" with 16 hexadecimal digits.
std::string dtype_name(DType dtype);
constexpr std::uint32_t dtype_nbytes(DType dtype) { return dtype.nbytes(); }
std::optional<DType> dtype_from_name(std::string_view name);
// Gives none for records too, whose number does not say which.
std::optional<DType> dtype_from_wire(std::uint8_t number);

using IndexList = std::shared_ptr<const std::vector<std::int64_t>>;

// One axis: `size` positions, the i-th at i * stride bytes, or at list[i] * stride.
struct Axis {
  std::int64_t size = 0;
  std::int64_t stride = 0;
  IndexList list;  // Null for a regular axis; else it has `size` entries.
};

// A typed, shaped piece of one storage.
struct TensorView {
  DType dtype = DType::kUint8;
  std::uint32_t storage = 0;  // Index into the owner's storages.
  std::int64_t offset = 0;    // Bytes from the storage's start to element (0, 0, ...).
  std::vector<Axis> axes;

  // Gives the number of elements; made so that it fits.
  std::int64_t numel() const;
  std::uint64_t nbytes() const { return static_cast<std::uint64_t>(numel()) * dtype_nbytes(dtype); }
  std::vector<std::int64_t> shape() const;
  // "float32[4, 16, 64]"
  std::string describe() const;
};

// The bytes that a view reaches over, from its element (0, 0, ...).
struct Extent {
  std::int64_t begin;
  std::int64_t end;
};
// Errors: kOutOfRange when the view's numbers wrap. Cost: looks at every entry of its lists.
Result<Extent> extent_of(const TensorView& view);

// Refuses a view that is not entirely within `storage_nbytes`, or whose numbers wrap. The second
// form is for many views of one layout: `extent` is extent_of() any of them.
Status check_within(const TensorView& view, std::uint64_t storage_nbytes);
Status check_within(const TensorView& view, const Extent& extent, std::uint64_t storage_nbytes);

// One view, or the views of a group of named tensors.
struct View {
  std::vector<TensorView> tensors;
  std::vector<std::string> names;  // One per tensor of a group; empty for a single tensor.

  bool is_group() const { return !names.empty(); }
  std::uint64_t nbytes() const;
};

// --- Indexing ---

struct Slice {
  std::optional<std::int64_t> start;
  std::optional<std::int64_t> stop;
  std::optional<std::int64_t> step;
};
struct Ellipsis {};
using NameList = std::vector<std::string>;
// An integer drops its axis, a slice keeps it, a list picks positions from it. Several lists in
// one index act each on its own axis (as numpy.ix_ does), never zipped.
using Index = std::variant<std::int64_t, Slice, Ellipsis, IndexList, std::string, NameList>;

// Gives the view that an index selects. In a group the first index says which tensors: a name, a
// list of names or a slice; the rest applies to each.
// Errors: kOutOfRange beyond the shape, kInvalidArgument for an index of the wrong kind.
Result<View> index_view(const View& view, std::span<const Index> indices);

// Gives the view with its axes in another order: axis i of the result is axis dims[i]. In a group,
// of each tensor.
// Errors: kInvalidArgument unless `dims` names each axis once, kOutOfRange for an axis that is not
// there; negative ones count from the end.
Result<View> permute_view(const View& view, std::span<const std::int64_t> dims);

// Gives the same bytes as elements of another type; where the sizes differ the last axis grows or
// shrinks. In a group, of each tensor.
// Errors: kInvalidArgument, with the remedy, where the sizes differ and the last axis is not
// contiguous, or its bytes are no multiple of the new size.
Result<View> view_as(const View& view, DType dtype);

// --- Pairing ---

// Refuses two views that differ in number of tensors, shapes or dtypes. Errors: kLayoutMismatch.
Status check_same_layout(const View& source, const View& target);

// Refuses a target that names some byte twice. Errors: kInvalidArgument.
Status check_no_overlap(const TensorView& target);

// Gives the one run that pairs two views which are each contiguous and fit each other; nothing for all
// others, and for those without elements. Cost: nanoseconds.
std::optional<Run> one_run(const TensorView& local, std::byte* local_data, const TensorView& remote);

// Appends the runs that pair the elements of `local` (in memory at `local_data`) with those of
// `remote`, neighbours merged where both sides are contiguous; in the order in which they lie, as far
// as both sides agree.
// Gives how many pieces there are before neighbours are merged; with more than `most_pieces` it appends
// nothing.
// Requires: equal shapes and dtypes. Cost: grows with the number of pieces, not of elements.
std::uint64_t cut_runs(const TensorView& local, std::byte* local_data, const TensorView& remote,
                       std::vector<Run>& runs, std::uint64_t most_pieces = UINT64_MAX);

}  // namespace kvzc

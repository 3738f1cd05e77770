#include "kvzc/view.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <memory_resource>

#include "base/checked_math.h"
#include "base/sha256.h"
#include "base/spread.h"

namespace kvzc {
namespace {

constexpr std::string_view kNames[] = {
#define KVZC_NAME(code, name, nbytes) #name,
    KVZC_DTYPES(KVZC_NAME)
#undef KVZC_NAME
};
static_assert(std::size(kNames) < DType::kRecord);

constexpr std::string_view kRecordPrefix = "record";

// The smallest and largest position on an axis, in strides, 0 included: so that no partial sum of
// an element's offset lies outside either. Requires: size > 0.
std::pair<std::int64_t, std::int64_t> positions(const Axis& axis) {
  if (!axis.list) return {0, axis.size - 1};
  const auto [least, most] = std::minmax_element(axis.list->begin(), axis.list->end());
  return {std::min<std::int64_t>(*least, 0), std::max<std::int64_t>(*most, 0)};
}

Status wraps(const TensorView& view) {
  return Status(Code::kOutOfRange,
                "the extents of " + view.describe() + " do not fit into 64 bits");
}

}  // namespace

Result<DType> record_dtype(std::uint32_t nbytes, std::string_view description) {
  if (nbytes == 0) return Status(Code::kInvalidArgument, "an element without bytes is no element");
  const Digest digest = sha256(std::as_bytes(std::span(description)));
  std::uint64_t fingerprint = 0;
  for (std::size_t i = 0; i < sizeof fingerprint; ++i) {
    fingerprint = (fingerprint << 8) | std::to_integer<std::uint64_t>(digest[i]);
  }
  return DType(nbytes, fingerprint);
}

std::string dtype_name(DType dtype) {
  if (!dtype.is_record()) return std::string(kNames[dtype.number()]);
  std::string out(kRecordPrefix);
  out += std::to_string(dtype.nbytes()) + '-';
  for (int shift = 60; shift >= 0; shift -= 4) {
    out += "0123456789abcdef"[(dtype.fingerprint() >> shift) & 15];
  }
  return out;
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<DType::Number>(i);
  }
  if (!name.starts_with(kRecordPrefix)) return std::nullopt;
  const char* const end = name.data() + name.size();
  std::uint32_t nbytes = 0;
  std::uint64_t fingerprint = 0;
  const auto size = std::from_chars(name.data() + kRecordPrefix.size(), end, nbytes);
  if (size.ec != std::errc() || size.ptr == end) return std::nullopt;
  (void)std::from_chars(size.ptr + 1, end, fingerprint, 16);
  const DType record(nbytes, fingerprint);
  // Whatever was read wrongly shows here.
  return nbytes > 0 && dtype_name(record) == name ? std::optional(record) : std::nullopt;
}

std::optional<DType> dtype_from_wire(std::uint8_t number) {
  if (number >= std::size(kNames)) return std::nullopt;
  return static_cast<DType::Number>(number);
}

std::int64_t TensorView::numel() const {
  std::int64_t count = 1;
  for (const Axis& axis : axes) count *= axis.size;
  return count;
}

std::vector<std::int64_t> TensorView::shape() const {
  std::vector<std::int64_t> out;
  out.reserve(axes.size());
  for (const Axis& axis : axes) out.push_back(axis.size);
  return out;
}

std::string TensorView::describe() const {
  std::string out = dtype_name(dtype);
  out += '[';
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (i != 0) out += ", ";
    out += std::to_string(axes[i].size);
  }
  return out + ']';
}

Result<Extent> extent_of(const TensorView& view) {
  std::int64_t count = 1;
  std::int64_t total = 0;
  bool is_empty = false;
  for (const Axis& axis : view.axes) {
    if (axis.size < 0) return Status(Code::kOutOfRange, "an axis has a negative size");
    if (axis.size == 0) is_empty = true;
    // An empty view may still not have sizes whose product wraps: numel() would lie.
    if (multiply_overflows(count, std::max<std::int64_t>(axis.size, 1), &count)) return wraps(view);
  }
  const std::int64_t item = dtype_nbytes(view.dtype);
  if (multiply_overflows(count, item, &total)) return wraps(view);
  if (is_empty) return Extent{0, 0};
  Extent extent{0, item};
  for (const Axis& axis : view.axes) {
    const auto [least, most] = positions(axis);
    std::int64_t at_least;
    std::int64_t at_most;
    if (multiply_overflows(least, axis.stride, &at_least) ||
        multiply_overflows(most, axis.stride, &at_most) ||
        add_overflows(extent.begin, std::min(at_least, at_most), &extent.begin) ||
        add_overflows(extent.end, std::max(at_least, at_most), &extent.end)) {
      return wraps(view);
    }
  }
  return extent;
}

Status check_within(const TensorView& view, const Extent& extent, std::uint64_t storage_nbytes) {
  std::int64_t begin;
  std::int64_t end;
  if (add_overflows(view.offset, extent.begin, &begin) ||
      add_overflows(view.offset, extent.end, &end)) {
    return wraps(view);
  }
  if (begin >= 0 && static_cast<std::uint64_t>(end) <= storage_nbytes) return Status::ok();
  return Status(Code::kOutOfRange, view.describe() + " reaches over bytes " +
                                       std::to_string(begin) + " to " + std::to_string(end) +
                                       " of a storage of " + std::to_string(storage_nbytes));
}

Status check_within(const TensorView& view, std::uint64_t storage_nbytes) {
  const Result<Extent> extent = extent_of(view);
  return extent.is_ok() ? check_within(view, *extent, storage_nbytes) : extent.status();
}

std::uint64_t View::nbytes() const {
  std::uint64_t total = 0;
  for (const TensorView& tensor : tensors) total += tensor.nbytes();
  return total;
}

// --- Indexing ---

namespace {

Status out_of_range(std::int64_t index, std::size_t axis, std::int64_t size) {
  return Status(Code::kOutOfRange, "index " + std::to_string(index) + " is out of range for axis " +
                                       std::to_string(axis) + " of size " + std::to_string(size));
}

// Python's rules for slices, on an axis of `size`; also gives the number of positions.
struct Positions {
  std::int64_t first;
  std::int64_t step;
  std::int64_t count;
};

Positions resolve(const Slice& slice, std::int64_t size) {
  const std::int64_t step = slice.step.value_or(1);
  const auto clamp = [&](std::optional<std::int64_t> at, std::int64_t otherwise) {
    if (!at) return otherwise;
    std::int64_t value = *at;
    if (value < 0) value += size;
    const std::int64_t low = step > 0 ? 0 : -1;
    const std::int64_t high = step > 0 ? size : size - 1;
    return std::clamp(value, low, high);
  };
  const std::int64_t first = clamp(slice.start, step > 0 ? 0 : size - 1);
  const std::int64_t last = clamp(slice.stop, step > 0 ? size : -1);
  std::int64_t count = 0;
  if (step > 0 && first < last) count = (last - first - 1) / step + 1;
  // The magnitude of the most negative step has no int64, so it is never formed.
  if (step < 0 && last < first) {
    const auto magnitude = ~static_cast<std::uint64_t>(step) + 1;
    count = static_cast<std::int64_t>(static_cast<std::uint64_t>(first - last - 1) / magnitude) + 1;
  }
  return {first, step, count};
}

// The axis that `positions` select from `axis`; moves the offset when the axis is regular. A null
// offset says that the view is empty: its strides are bounded by nothing and not to be multiplied.
Axis take_slice(const Axis& axis, const Positions& at, std::int64_t* offset) {
  Axis out;
  out.size = at.count;
  if (axis.list) {
    auto list = std::make_shared<std::vector<std::int64_t>>();
    list->reserve(static_cast<std::size_t>(at.count));
    for (std::int64_t i = 0; i < at.count; ++i) {
      list->push_back((*axis.list)[static_cast<std::size_t>(at.first + i * at.step)]);
    }
    out.stride = axis.stride;
    out.list = std::move(list);
    return out;
  }
  if (at.count == 0 || offset == nullptr) {
    out.stride = axis.stride;
    return out;
  }
  *offset += at.first * axis.stride;
  // A single position never steps, so a huge step must not be multiplied out.
  out.stride = at.count == 1 ? axis.stride : axis.stride * at.step;
  return out;
}

Result<Axis> take_list(const Axis& axis, const IndexList& ids, std::size_t number) {
  Axis out;
  out.size = static_cast<std::int64_t>(ids->size());
  out.stride = axis.stride;
  bool as_given = !axis.list;
  for (const std::int64_t id : *ids) {
    if (id < -axis.size || id >= axis.size) return out_of_range(id, number, axis.size);
    if (id < 0) as_given = false;
  }
  if (as_given) {
    out.list = ids;
    return out;
  }
  auto list = std::make_shared<std::vector<std::int64_t>>();
  list->reserve(ids->size());
  for (std::int64_t id : *ids) {
    if (id < 0) id += axis.size;
    list->push_back(axis.list ? (*axis.list)[static_cast<std::size_t>(id)] : id);
  }
  out.list = std::move(list);
  return out;
}

Result<TensorView> index_tensor(const TensorView& view, std::span<const Index> indices) {
  std::size_t used = 0;
  std::size_t ellipses = 0;
  for (const Index& index : indices) {
    if (std::holds_alternative<Ellipsis>(index)) {
      ++ellipses;
    } else {
      ++used;
    }
  }
  if (ellipses > 1) return Status(Code::kInvalidArgument, "an index has more than one '...'");
  if (used > view.axes.size()) {
    return Status(Code::kOutOfRange, std::to_string(used) + " indices for " + view.describe() +
                                         ", which has " + std::to_string(view.axes.size()) +
                                         " axes");
  }
  TensorView out;
  out.dtype = view.dtype;
  out.storage = view.storage;
  out.offset = view.offset;
  out.axes.reserve(view.axes.size());
  // No element of an empty view is ever reached: its offset stays where it is, within the storage.
  const bool is_empty = std::any_of(view.axes.begin(), view.axes.end(),
                                    [](const Axis& axis) { return axis.size == 0; });
  std::size_t axis_number = 0;
  for (const Index& index : indices) {
    if (std::holds_alternative<Ellipsis>(index)) {
      for (std::size_t skip = view.axes.size() - used; skip > 0; --skip) {
        out.axes.push_back(view.axes[axis_number++]);
      }
      continue;
    }
    const Axis& axis = view.axes[axis_number];
    if (const auto* integer = std::get_if<std::int64_t>(&index)) {
      std::int64_t at = *integer;
      if (at < -axis.size || at >= axis.size) return out_of_range(at, axis_number, axis.size);
      if (at < 0) at += axis.size;
      if (!is_empty) {
        out.offset += (axis.list ? (*axis.list)[static_cast<std::size_t>(at)] : at) * axis.stride;
      }
    } else if (const auto* slice = std::get_if<Slice>(&index)) {
      if (slice->step == 0) return Status(Code::kInvalidArgument, "a slice has step 0");
      out.axes.push_back(
          take_slice(axis, resolve(*slice, axis.size), is_empty ? nullptr : &out.offset));
    } else if (const auto* list = std::get_if<IndexList>(&index)) {
      Result<Axis> taken = take_list(axis, *list, axis_number);
      if (!taken.is_ok()) return taken.status();
      out.axes.push_back(taken.take());
    } else {
      return Status(Code::kInvalidArgument,
                    "names select tensors of a group, and this is a single tensor");
    }
    ++axis_number;
  }
  while (axis_number < view.axes.size()) out.axes.push_back(view.axes[axis_number++]);
  // Lists that repeat positions can select more elements than the memory has.
  std::int64_t total = dtype_nbytes(out.dtype);
  for (const Axis& axis : out.axes) {
    if (multiply_overflows(total, std::max<std::int64_t>(axis.size, 1), &total)) return wraps(out);
  }
  return out;
}

Result<std::size_t> find_name(const View& view, const std::string& name) {
  const auto at = std::find(view.names.begin(), view.names.end(), name);
  if (at != view.names.end()) return static_cast<std::size_t>(at - view.names.begin());
  std::string known;
  for (std::size_t i = 0; i < view.names.size() && i < 4; ++i) {
    known += (i == 0 ? "'" : ", '") + view.names[i] + "'";
  }
  if (view.names.size() > 4) known += ", ...";
  return Status(Code::kOutOfRange, "the group has no tensor '" + name + "'; it has " + known);
}

}  // namespace

Result<View> index_view(const View& view, std::span<const Index> indices) {
  View out;
  if (!view.is_group()) {
    Result<TensorView> tensor = index_tensor(view.tensors[0], indices);
    if (!tensor.is_ok()) return tensor.status();
    out.tensors.push_back(tensor.take());
    return out;
  }
  std::vector<std::size_t> chosen;
  bool one_by_name = false;
  std::span<const Index> rest = indices;
  const auto choose_all = [&] {
    for (std::size_t i = 0; i < view.tensors.size(); ++i) chosen.push_back(i);
  };
  if (indices.empty() || std::holds_alternative<Ellipsis>(indices[0])) {
    choose_all();
  } else {
    rest = indices.subspan(1);
    if (const auto* name = std::get_if<std::string>(&indices[0])) {
      Result<std::size_t> at = find_name(view, *name);
      if (!at.is_ok()) return at.status();
      chosen.push_back(*at);
      one_by_name = true;
    } else if (const auto* names = std::get_if<NameList>(&indices[0])) {
      for (const std::string& each : *names) {
        Result<std::size_t> at = find_name(view, each);
        if (!at.is_ok()) return at.status();
        chosen.push_back(*at);
      }
    } else if (const auto* slice = std::get_if<Slice>(&indices[0])) {
      if (slice->step == 0) return Status(Code::kInvalidArgument, "a slice has step 0");
      const Positions at = resolve(*slice, static_cast<std::int64_t>(view.tensors.size()));
      for (std::int64_t i = 0; i < at.count; ++i) {
        chosen.push_back(static_cast<std::size_t>(at.first + i * at.step));
      }
    } else {
      return Status(Code::kInvalidArgument,
                    "the first index of a group is a name, a list of names or a slice");
    }
  }
  for (const std::size_t at : chosen) {
    Result<TensorView> tensor = index_tensor(view.tensors[at], rest);
    if (!tensor.is_ok()) {
      return Status(tensor.status().code(),
                    "tensor '" + view.names[at] + "': " + std::string(tensor.status().text()));
    }
    out.tensors.push_back(tensor.take());
    if (!one_by_name) out.names.push_back(view.names[at]);
  }
  if (out.tensors.empty()) {
    return Status(Code::kInvalidArgument, "the index selects no tensor of the group");
  }
  return out;
}

// --- Other views of the same bytes ---

namespace {

Result<TensorView> permute_tensor(const TensorView& view, std::span<const std::int64_t> dims) {
  const auto count = static_cast<std::int64_t>(view.axes.size());
  if (dims.size() != view.axes.size()) {
    return Status(Code::kInvalidArgument, "permute() of " + view.describe() + " takes " +
                                              std::to_string(count) + " axes, each once, not " +
                                              std::to_string(dims.size()));
  }
  TensorView out;
  out.dtype = view.dtype;
  out.storage = view.storage;
  out.offset = view.offset;
  out.axes.reserve(view.axes.size());
  std::vector<bool> is_taken(view.axes.size(), false);
  for (const std::int64_t dim : dims) {
    if (dim < -count || dim >= count) {
      return Status(Code::kOutOfRange,
                    "axis " + std::to_string(dim) + " is none of those of " + view.describe());
    }
    const auto axis = static_cast<std::size_t>(dim < 0 ? dim + count : dim);
    if (is_taken[axis]) {
      return Status(Code::kInvalidArgument, "permute() names axis " + std::to_string(axis) +
                                                " twice; each axis is named once");
    }
    is_taken[axis] = true;
    out.axes.push_back(view.axes[axis]);
  }
  return out;
}

Result<TensorView> view_tensor_as(const TensorView& view, DType dtype) {
  TensorView out = view;
  out.dtype = dtype;
  const auto old_item = static_cast<std::int64_t>(view.dtype.nbytes());
  const auto item = static_cast<std::int64_t>(dtype.nbytes());
  if (item == old_item) return out;
  const std::string what = view.describe() + " as " + dtype_name(dtype);
  if (view.axes.empty()) {
    return Status(Code::kInvalidArgument,
                  "no view of " + what +
                      ": the sizes of the elements differ, and there is no axis that could grow or "
                      "shrink");
  }
  const bool is_empty = view.numel() == 0;
  Axis& last = out.axes.back();
  // A single position, or none, lies next to nothing: it may have any stride.
  if (last.size > 1 && !is_empty && (last.list || last.stride != old_item)) {
    return Status(Code::kInvalidArgument,
                  "no view of " + what +
                      ": the sizes of the elements differ, and the last axis is not contiguous; "
                      "take the view first and index or permute it then");
  }
  // It fits: extents are checked with the size of an element.
  const std::int64_t nbytes = last.size * old_item;
  if (nbytes % item != 0) {
    return Status(Code::kInvalidArgument, "no view of " + what + ": the last axis has " +
                                              std::to_string(nbytes) + " bytes, no multiple of " +
                                              std::to_string(item));
  }
  if (last.list && !is_empty) out.offset += (*last.list)[0] * last.stride;
  last = {nbytes / item, item, nullptr};
  // An empty view has no bytes that its other axes would be bounded by.
  std::int64_t total = item;
  for (const Axis& axis : out.axes) {
    if (multiply_overflows(total, std::max<std::int64_t>(axis.size, 1), &total)) return wraps(out);
  }
  return out;
}

// Each tensor as `change` makes it; an error says which it was.
template <typename Change>
Result<View> change_each(const View& view, const Change& change) {
  View out;
  out.names = view.names;
  out.tensors.reserve(view.tensors.size());
  for (std::size_t i = 0; i < view.tensors.size(); ++i) {
    Result<TensorView> tensor = change(view.tensors[i]);
    if (!tensor.is_ok()) {
      if (!view.is_group()) return tensor.status();
      return Status(tensor.status().code(),
                    "tensor '" + view.names[i] + "': " + std::string(tensor.status().text()));
    }
    out.tensors.push_back(tensor.take());
  }
  return out;
}

}  // namespace

Result<View> permute_view(const View& view, std::span<const std::int64_t> dims) {
  return change_each(view, [dims](const TensorView& each) { return permute_tensor(each, dims); });
}

Result<View> view_as(const View& view, DType dtype) {
  return change_each(view, [dtype](const TensorView& each) { return view_tensor_as(each, dtype); });
}

// --- Pairing ---

Status check_same_layout(const View& source, const View& target) {
  if (source.tensors.size() != target.tensors.size()) {
    return Status(Code::kLayoutMismatch, "the source has " + std::to_string(source.tensors.size()) +
                                             " tensors and the target " +
                                             std::to_string(target.tensors.size()) +
                                             "; pick the same number on both sides");
  }
  for (std::size_t i = 0; i < source.tensors.size(); ++i) {
    const TensorView& a = source.tensors[i];
    const TensorView& b = target.tensors[i];
    bool is_same = a.dtype == b.dtype && a.axes.size() == b.axes.size();
    for (std::size_t axis = 0; is_same && axis < a.axes.size(); ++axis) {
      is_same = a.axes[axis].size == b.axes[axis].size;
    }
    if (is_same) continue;
    const std::string which =
        target.is_group() ? " (tensor '" + target.names[i] + "')" : std::string();
    return Status(Code::kLayoutMismatch,
                  "the source is " + a.describe() + " and the target " + b.describe() + which +
                      "; shapes and dtypes must be equal, nothing is broadcast or converted");
  }
  return Status::ok();
}

namespace {

// Also of the least number there is.
std::uint64_t magnitude(std::int64_t number) {
  const auto bits = static_cast<std::uint64_t>(number);
  return number < 0 ? ~bits + 1 : bits;
}

// Axes of both sides, outermost first, with what belongs together joined.
struct PairedAxis {
  std::int64_t size;
  std::int64_t local_stride;
  std::int64_t remote_stride;
  const std::int64_t* local_list;  // Null: regular.
  const std::int64_t* remote_list;

  bool is_regular() const { return local_list == nullptr && remote_list == nullptr; }
  // How far one position is from the next, on the side where that is more.
  std::uint64_t step() const { return std::max(magnitude(local_stride), magnitude(remote_stride)); }
  std::int64_t local(std::int64_t i) const {
    return (local_list != nullptr ? local_list[i] : i) * local_stride;
  }
  std::int64_t remote(std::int64_t i) const {
    return (remote_list != nullptr ? remote_list[i] : i) * remote_stride;
  }
};

constexpr std::size_t kTypicalAxes = 8;
// Of runs, at once: a list that grows as it is filled is copied again and again.
constexpr std::uint64_t kMostReserved = 1 << 16;

// Says whether `size` steps of `stride` are one step of `outer`.
bool spans(std::int64_t size, std::int64_t stride, std::int64_t outer) {
  std::int64_t product;
  return !multiply_overflows(size, stride, &product) && product == outer;
}

// Puts runs together while they continue each other on both sides.
class RunMerger {
 public:
  explicit RunMerger(std::vector<Run>& runs) : runs_(runs) {}
  void add(std::byte* local, std::uint64_t remote, std::uint64_t nbytes) {
    if (local == local_end_ && remote == remote_end_) {
      runs_.back().nbytes += nbytes;
    } else {
      runs_.push_back({local, remote, nbytes});
    }
    local_end_ = local + nbytes;
    remote_end_ = remote + nbytes;
  }

 private:
  std::vector<Run>& runs_;
  std::byte* local_end_ = nullptr;
  std::uint64_t remote_end_ = ~std::uint64_t{0};  // No run ends here.
};

// Two views as one walk: pieces of `piece` bytes, one per position on the axes. Made for every put, so
// it allocates only for more axes than tensors have.
struct Pairing {
  // Requires: equal shapes and dtypes, at least one element.
  Pairing(const TensorView& local, const TensorView& remote);
  Pairing(const Pairing&) = delete;
  Pairing& operator=(const Pairing&) = delete;

 private:
  alignas(PairedAxis) std::byte room_[kTypicalAxes * sizeof(PairedAxis)];
  std::pmr::monotonic_buffer_resource memory_{room_, sizeof room_};

 public:
  std::pmr::vector<PairedAxis> axes{&memory_};
  std::int64_t local_at;
  std::int64_t remote_at;
  std::int64_t piece;
};

Pairing::Pairing(const TensorView& local, const TensorView& remote)
    : local_at(local.offset), remote_at(remote.offset), piece(dtype_nbytes(local.dtype)) {
  const std::int64_t item = piece;
  axes.reserve(kTypicalAxes);
  for (std::size_t i = 0; i < local.axes.size(); ++i) {
    const Axis& a = local.axes[i];
    const Axis& b = remote.axes[i];
    PairedAxis axis{a.size, a.stride, b.stride, a.list ? a.list->data() : nullptr,
                    b.list ? b.list->data() : nullptr};
    if (axis.size == 1) {
      local_at += axis.local(0);
      remote_at += axis.remote(0);
      continue;
    }
    // Walked backwards on both sides is the same as forwards.
    if (axis.is_regular() && axis.local_stride < 0 && axis.remote_stride < 0) {
      local_at += (axis.size - 1) * axis.local_stride;
      remote_at += (axis.size - 1) * axis.remote_stride;
      axis.local_stride = -axis.local_stride;
      axis.remote_stride = -axis.remote_stride;
    }
    axes.push_back(axis);
  }
  // Walked in the order in which they lie, so that what both sides have permuted alike is one piece.
  if (std::all_of(axes.begin(), axes.end(), [](const PairedAxis& each) { return each.is_regular(); })) {
    // By insertion: they are few, mostly in order, and nothing is allocated.
    for (auto at = axes.begin(); at != axes.end(); ++at) {
      const auto place = std::upper_bound(
          axes.begin(), at, *at,
          [](const PairedAxis& x, const PairedAxis& y) { return x.step() > y.step(); });
      std::rotate(place, at, std::next(at));
    }
  }
  std::size_t kept = 0;
  for (const PairedAxis& axis : axes) {
    PairedAxis* const outer = kept > 0 ? &axes[kept - 1] : nullptr;
    if (outer != nullptr && outer->is_regular() && axis.is_regular() &&
        spans(axis.size, axis.local_stride, outer->local_stride) &&
        spans(axis.size, axis.remote_stride, outer->remote_stride)) {
      outer->size *= axis.size;
      outer->local_stride = axis.local_stride;
      outer->remote_stride = axis.remote_stride;
    } else {
      axes[kept++] = axis;
    }
  }
  axes.resize(kept);
  if (!axes.empty() && axes.back().is_regular() && axes.back().local_stride == item &&
      axes.back().remote_stride == item) {
    piece = axes.back().size * item;
    axes.pop_back();
  }
}

// Says whether its elements lie one behind the other, in index order.
bool is_contiguous(const TensorView& view) {
  std::int64_t covered = dtype_nbytes(view.dtype);
  for (auto axis = view.axes.rbegin(); axis != view.axes.rend(); ++axis) {
    if (axis->list || (axis->size != 1 && axis->stride != covered)) return false;
    covered *= axis->size;
  }
  return true;
}

// Says whether each axis steps over everything that those after it cover, as in every tensor that
// was not transposed: then no byte is there twice, and that is quickly seen.
bool steps_outwards(const TensorView& view) {
  std::int64_t covered = dtype_nbytes(view.dtype);
  for (auto axis = view.axes.rbegin(); axis != view.axes.rend(); ++axis) {
    if (axis->size == 1) continue;
    if (axis->list) return false;  // Its stride may be any number, if all its positions are 0.
    const std::int64_t stride = std::abs(axis->stride);
    if (stride < covered) return false;
    covered += (axis->size - 1) * stride;
  }
  return true;
}

}  // namespace

std::optional<Run> one_run(const TensorView& local, std::byte* local_data,
                           const TensorView& remote) {
  if (local.axes.size() != remote.axes.size() || local.dtype != remote.dtype) return std::nullopt;
  std::int64_t nbytes = dtype_nbytes(local.dtype);
  for (std::size_t i = local.axes.size(); i-- > 0;) {
    const Axis& here = local.axes[i];
    const Axis& there = remote.axes[i];
    if (here.size != there.size || here.size == 0 || here.list || there.list) return std::nullopt;
    if (here.size == 1) continue;  // Whatever its stride, nobody walks it.
    if (here.stride != nbytes || there.stride != nbytes) return std::nullopt;
    nbytes *= here.size;
  }
  return Run{local_data + local.offset, static_cast<std::uint64_t>(remote.offset),
             static_cast<std::uint64_t>(nbytes)};
}

std::uint64_t cut_runs(const TensorView& local, std::byte* local_data, const TensorView& remote,
                       std::vector<Run>& runs, std::uint64_t most_pieces) {
  if (local.numel() == 0) return 0;
  if (most_pieces > 0 && is_contiguous(local) && is_contiguous(remote)) {
    runs.push_back(
        {local_data + local.offset, static_cast<std::uint64_t>(remote.offset), local.nbytes()});
    return 1;
  }
  const Pairing pairing(local, remote);
  std::uint64_t pieces = 1;
  for (const PairedAxis& axis : pairing.axes) pieces *= static_cast<std::uint64_t>(axis.size);
  if (pieces > most_pieces) return pieces;
  const auto& axes = pairing.axes;
  const auto piece = static_cast<std::uint64_t>(pairing.piece);
  // Never by a little: many tensors of few pieces each come here.
  if (const std::size_t wanted = runs.size() + std::min(pieces, kMostReserved); wanted > runs.capacity()) {
    runs.reserve(std::max(wanted, 2 * runs.capacity()));
  }
  RunMerger merger(runs);
  if (axes.empty()) {
    merger.add(local_data + pairing.local_at, static_cast<std::uint64_t>(pairing.remote_at), piece);
    return pieces;
  }
  const PairedAxis inner = axes.back();
  const std::size_t outer_count = axes.size() - 1;
  std::vector<std::int64_t> counters(outer_count, 0);
  for (;;) {
    std::int64_t local_row = pairing.local_at;
    std::int64_t remote_row = pairing.remote_at;
    for (std::size_t i = 0; i < outer_count; ++i) {
      local_row += axes[i].local(counters[i]);
      remote_row += axes[i].remote(counters[i]);
    }
    for (std::int64_t i = 0; i < inner.size; ++i) {
      merger.add(local_data + local_row + inner.local(i),
                 static_cast<std::uint64_t>(remote_row + inner.remote(i)), piece);
    }
    std::size_t axis = outer_count;
    while (axis > 0 && ++counters[axis - 1] == axes[axis - 1].size) counters[--axis] = 0;
    if (axis == 0) return pieces;
  }
}

Status check_no_overlap(const TensorView& target) {
  if (target.numel() == 0 || steps_outwards(target)) return Status::ok();
  // Sorted by step, each axis must step over everything that the inner ones cover. Lists are
  // looked at by their closest two entries.
  struct Step {
    std::int64_t stride;
    std::int64_t extent;
  };
  std::vector<Step> steps;
  steps.reserve(kTypicalAxes);
  for (const Axis& axis : target.axes) {
    if (axis.size == 1) continue;
    if (!axis.list) {
      const std::int64_t stride = std::abs(axis.stride);
      steps.push_back({stride, (axis.size - 1) * stride});
      continue;
    }
    const Spread spread = spread_of(std::span<const std::int64_t>(*axis.list));
    if (spread.closest == 0) {
      return Status(Code::kInvalidArgument, "the target names position " +
                                                std::to_string(spread.twice) +
                                                " of an axis twice; each byte can be written "
                                                "once per transfer");
    }
    steps.push_back({static_cast<std::int64_t>(spread.closest) * std::abs(axis.stride),
                     (spread.most - spread.least) * std::abs(axis.stride)});
  }
  std::sort(steps.begin(), steps.end(),
            [](const Step& a, const Step& b) { return a.stride < b.stride; });
  std::int64_t covered = dtype_nbytes(target.dtype);
  bool is_certain = true;
  for (const Step& step : steps) {
    is_certain = is_certain && step.stride >= covered;
    covered += step.extent;
  }
  if (is_certain) return Status::ok();

  const auto overlaps = [&target] {
    return Status(Code::kInvalidArgument,
                  "the target " + target.describe() +
                      " overlaps itself (expanded or overlapping strides); each byte can be "
                      "written once per transfer");
  };
  // More bytes than there is room for, as in every expanded view: no need to look at them all.
  if (target.nbytes() > static_cast<std::uint64_t>(covered)) return overlaps();
  // Interleaved or truly overlapping: look at the bytes themselves.
  std::vector<Run> runs;
  cut_runs(target, nullptr, target, runs);
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return a.remote < b.remote; });
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].remote < runs[i - 1].remote + runs[i - 1].nbytes) return overlaps();
  }
  return Status::ok();
}

}  // namespace kvzc

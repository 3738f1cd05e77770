#include "kvzc/view.h"

#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

__extension__ using Wide = __int128;

constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

IndexList list_of(std::vector<std::int64_t> ids) {
  return std::make_shared<const std::vector<std::int64_t>>(std::move(ids));
}

// A view without lists.
TensorView regular(DType dtype, std::int64_t offset,
                   const std::vector<std::pair<std::int64_t, std::int64_t>>& size_and_stride) {
  TensorView out;
  out.dtype = dtype;
  out.offset = offset;
  for (const auto& [size, stride] : size_and_stride) out.axes.push_back({size, stride, nullptr});
  return out;
}

TensorView contiguous(DType dtype, const std::vector<std::int64_t>& shape) {
  TensorView out;
  out.dtype = dtype;
  std::int64_t stride = dtype_nbytes(dtype);
  for (std::size_t i = shape.size(); i-- > 0;) {
    out.axes.insert(out.axes.begin(), Axis{shape[i], stride, nullptr});
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  return out;
}

// --- The model: a view is the list of its elements' offsets, in index order ---

std::int64_t position(const Axis& axis, std::int64_t i) {
  return (axis.list ? (*axis.list)[static_cast<std::size_t>(i)] : i) * axis.stride;
}

std::vector<std::int64_t> offsets_of(const TensorView& view) {
  std::vector<std::int64_t> out = {view.offset};
  for (const Axis& axis : view.axes) {
    std::vector<std::int64_t> next;
    for (const std::int64_t at : out) {
      for (std::int64_t i = 0; i < axis.size; ++i) next.push_back(at + position(axis, i));
    }
    out = std::move(next);
  }
  return out;
}

// What an array of offsets becomes by indexing, after Python's rules and by counting only.
struct Model {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> offsets;
};

std::vector<std::int64_t> slice_positions(const Slice& slice, std::int64_t size) {
  const Wide step = slice.step.value_or(1);
  const auto normal = [&](std::int64_t given) -> Wide {
    Wide at = given;
    if (at < 0) at += size;
    return at;
  };
  Wide start = step > 0 ? Wide{0} : Wide{size} - 1;
  Wide stop = step > 0 ? Wide{size} : Wide{-1};
  // Whatever lies outside counts as one beyond the end on its side.
  if (slice.start) {
    start = std::clamp(normal(*slice.start), Wide{-1}, Wide{size});
    if (step > 0) start = std::max(start, Wide{0});
    if (step < 0) start = std::min(start, Wide{size} - 1);
  }
  if (slice.stop) stop = std::clamp(normal(*slice.stop), Wide{-1}, Wide{size});
  std::vector<std::int64_t> out;
  for (Wide at = start; step > 0 ? at < stop : at > stop; at += step) {
    out.push_back(static_cast<std::int64_t>(at));
  }
  return out;
}

// Gives the code of the first error, or the model of the result.
std::variant<Code, Model> index_model(const Model& from, const std::vector<Index>& indices) {
  std::size_t ellipses = 0;
  for (const Index& index : indices) ellipses += std::holds_alternative<Ellipsis>(index) ? 1 : 0;
  if (ellipses > 1) return Code::kInvalidArgument;
  const std::size_t used = indices.size() - ellipses;
  if (used > from.shape.size()) return Code::kOutOfRange;
  std::vector<Index> full;
  for (const Index& index : indices) {
    if (!std::holds_alternative<Ellipsis>(index)) {
      full.emplace_back(index);
      continue;
    }
    for (std::size_t i = used; i < from.shape.size(); ++i) full.emplace_back(Slice{});
  }
  while (full.size() < from.shape.size()) full.emplace_back(Slice{});

  Model out;
  std::vector<std::vector<std::int64_t>> chosen;
  for (std::size_t axis = 0; axis < full.size(); ++axis) {
    const std::int64_t size = from.shape[axis];
    std::vector<std::int64_t> positions;
    if (const auto* integer = std::get_if<std::int64_t>(&full[axis])) {
      if (*integer < -size || *integer >= size) return Code::kOutOfRange;
      positions = {*integer < 0 ? *integer + size : *integer};
    } else if (const auto* slice = std::get_if<Slice>(&full[axis])) {
      if (slice->step == 0) return Code::kInvalidArgument;
      positions = slice_positions(*slice, size);
      out.shape.push_back(static_cast<std::int64_t>(positions.size()));
    } else if (const auto* list = std::get_if<IndexList>(&full[axis])) {
      for (const std::int64_t id : **list) {
        if (id < -size || id >= size) return Code::kOutOfRange;
        positions.push_back(id < 0 ? id + size : id);
      }
      out.shape.push_back(static_cast<std::int64_t>(positions.size()));
    } else {
      return Code::kInvalidArgument;
    }
    chosen.push_back(std::move(positions));
  }
  std::vector<std::int64_t> flat = {0};
  for (std::size_t axis = 0; axis < full.size(); ++axis) {
    std::vector<std::int64_t> next;
    for (const std::int64_t before : flat) {
      for (const std::int64_t at : chosen[axis]) next.push_back(before * from.shape[axis] + at);
    }
    flat = std::move(next);
  }
  for (const std::int64_t at : flat)
    out.offsets.push_back(from.offsets[static_cast<std::size_t>(at)]);
  return out;
}

std::string describe(const TensorView& view) {
  std::string out = view.describe() + " at " + std::to_string(view.offset) + " strides";
  for (const Axis& axis : view.axes) {
    out += " " + std::to_string(axis.stride);
    if (!axis.list) continue;
    out += "*{";
    for (const std::int64_t id : *axis.list) out += std::to_string(id) + " ";
    out += "}";
  }
  return out;
}

std::string describe(const std::vector<Index>& indices) {
  std::string out = "[";
  const auto number = [](const std::optional<std::int64_t>& value) {
    return value ? std::to_string(*value) : std::string();
  };
  for (const Index& index : indices) {
    if (const auto* integer = std::get_if<std::int64_t>(&index)) {
      out += std::to_string(*integer);
    } else if (const auto* slice = std::get_if<Slice>(&index)) {
      out += number(slice->start) + ":" + number(slice->stop) + ":" + number(slice->step);
    } else if (const auto* list = std::get_if<IndexList>(&index)) {
      out += "{";
      for (const std::int64_t id : **list) out += std::to_string(id) + " ";
      out += "}";
    } else {
      out += std::holds_alternative<Ellipsis>(index) ? "..." : "name";
    }
    out += ", ";
  }
  return out + "]";
}

// Puts a view at the first offset where nothing of it lies before its storage, plus `extra`, and
// gives the size of the storage that it needs.
std::uint64_t settle(TensorView* view, std::int64_t extra) {
  view->offset = 0;
  const std::vector<std::int64_t> offsets = offsets_of(*view);
  if (offsets.empty()) {
    view->offset = extra;
    return static_cast<std::uint64_t>(extra);
  }
  const auto [low, high] = std::minmax_element(offsets.begin(), offsets.end());
  view->offset = extra - *low;
  return static_cast<std::uint64_t>(*high - *low + extra) + dtype_nbytes(view->dtype);
}

const std::vector<DType> kSomeDTypes = {DType::kUint8, DType::kBfloat16, DType::kFloat32,
                                        DType::kInt64, DType::kComplex128};

TensorView random_view(test::Random& random) {
  std::vector<std::int64_t> shape;
  for (std::int64_t axes = random.between(0, 4); axes > 0; --axes) {
    shape.push_back(random.one_in(12) ? 0 : random.between(1, 5));
  }
  TensorView view = contiguous(random.pick(kSomeDTypes), shape);
  for (Axis& axis : view.axes) {
    switch (random.between(0, 5)) {
      case 0:
        axis.stride = -axis.stride;
        break;
      case 1:
        axis.stride = 0;
        break;
      case 2:
        axis.stride = random.between(-100, 100);
        break;
      default:
        break;
    }
  }
  if (random.one_in(2)) std::shuffle(view.axes.begin(), view.axes.end(), random.engine);
  return view;
}

std::optional<std::int64_t> random_bound(test::Random& random, std::int64_t size) {
  switch (random.between(0, 9)) {
    case 0:
      return kLeast + random.between(0, 2);
    case 1:
      return kMost - random.between(0, 2);
    case 2:
    case 3:
      return std::nullopt;
    default:
      return random.between(-size - 2, size + 2);
  }
}

std::optional<std::int64_t> random_step(test::Random& random) {
  switch (random.between(0, 9)) {
    case 0:
      return kLeast + random.between(0, 2);
    case 1:
      return kMost - random.between(0, 2);
    case 2:
    case 3:
      return std::nullopt;
    case 4:
      return random.one_in(8) ? 0 : 1;
    default: {
      const std::int64_t step = random.between(1, 4);
      return random.one_in(2) ? step : -step;
    }
  }
}

std::vector<Index> random_indices(test::Random& random, const std::vector<std::int64_t>& shape) {
  std::vector<Index> out;
  std::int64_t count = random.between(0, static_cast<std::int64_t>(shape.size()));
  if (random.one_in(40)) count = static_cast<std::int64_t>(shape.size()) + 1;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t size =
        static_cast<std::size_t>(i) < shape.size() ? shape[static_cast<std::size_t>(i)] : 1;
    // At times one beyond the end.
    const std::int64_t slack = random.one_in(40) ? 1 : 0;
    switch (random.between(0, 3)) {
      case 0:
        if (size + slack == 0) {
          out.emplace_back(Slice{});
        } else {
          out.emplace_back(random.between(-size - slack, size - 1 + slack));
        }
        break;
      case 1: {
        std::vector<std::int64_t> ids;
        if (size != 0) {
          for (std::int64_t n = random.between(0, 5); n > 0; --n) {
            ids.push_back(random.between(-size - slack, size - 1 + slack));
          }
        }
        out.emplace_back(list_of(std::move(ids)));
        break;
      }
      default:
        out.emplace_back(
            Slice{random_bound(random, size), random_bound(random, size), random_step(random)});
    }
    if (random.one_in(200)) out.back() = std::string("name");
  }
  for (int n = random.one_in(3) ? (random.one_in(10) ? 2 : 1) : 0; n > 0; --n) {
    out.insert(out.begin() + random.between(0, static_cast<std::int64_t>(out.size())), Ellipsis{});
  }
  return out;
}

TEST(IndexView, SelectsTheElementsThatTheModelSelects) {
  test::Random random(20240501);
  KVZC_TRACE_SEED(random);
  int errors = 0;
  int empty = 0;
  std::string beyond;
  for (int round = 0; round < 40'000; ++round) {
    TensorView tensor = random_view(random);
    const std::uint64_t storage_nbytes = settle(&tensor, random.between(0, 40));
    ASSERT_TRUE(check_within(tensor, storage_nbytes).is_ok()) << describe(tensor);
    tensor.storage = 3;
    View view{{tensor}, {}};
    Model model{tensor.shape(), offsets_of(tensor)};
    for (std::int64_t depth = random.between(1, 3); depth > 0; --depth) {
      const std::vector<Index> indices = random_indices(random, model.shape);
      const std::string what = "round " + std::to_string(round) + ": " + describe(view.tensors[0]) +
                               " " + describe(indices);
      Result<View> got = index_view(view, indices);
      std::variant<Code, Model> expected = index_model(model, indices);
      if (const Code* code = std::get_if<Code>(&expected)) {
        ++errors;
        ASSERT_EQ(got.status().code(), *code) << what;
        ASSERT_FALSE(got.status().text().empty()) << what;
        break;
      }
      ASSERT_TRUE(got.is_ok()) << what << ": " << got.status().to_string();
      ASSERT_FALSE(got->is_group()) << what;
      ASSERT_EQ(got->tensors.size(), 1u) << what;
      const TensorView& indexed = got->tensors[0];
      model = std::get<Model>(std::move(expected));
      if (model.offsets.empty()) ++empty;
      ASSERT_EQ(indexed.shape(), model.shape) << what;
      ASSERT_EQ(offsets_of(indexed), model.offsets) << what;
      ASSERT_EQ(indexed.numel(), static_cast<std::int64_t>(model.offsets.size())) << what;
      ASSERT_EQ(indexed.dtype, tensor.dtype) << what;
      ASSERT_EQ(indexed.storage, 3u) << what;
      for (const Axis& axis : indexed.axes) {
        if (axis.list) {
          ASSERT_EQ(static_cast<std::int64_t>(axis.list->size()), axis.size) << what;
        }
      }
      // The promise of view.h, also of a view without elements.
      if (!check_within(indexed, storage_nbytes).is_ok()) {
        ASSERT_TRUE(model.offsets.empty()) << what;
        if (beyond.empty()) beyond = what + " gave " + describe(indexed);
      }
      view = got.take();
    }
  }
  EXPECT_EQ(beyond, "") << "an empty view lies beyond its storage";
  EXPECT_GT(errors, 500);
  EXPECT_GT(empty, 500);
}

TEST(IndexView, KeepsAnEmptyViewWithinItsStorage) {
  // As big[10:] of ten rows of four numbers.
  const View view{{regular(DType::kFloat32, 160, {{0, 16}, {4, 4}})}, {}};
  ASSERT_TRUE(check_within(view.tensors[0], 160).is_ok());
  for (const Index& second :
       std::vector<Index>{std::int64_t{3}, Slice{2, {}, {}}, Slice{{}, {}, -1}, list_of({3, 1})}) {
    const std::vector<Index> indices = {Slice{}, second};
    Result<View> got = index_view(view, indices);
    ASSERT_TRUE(got.is_ok());
    EXPECT_EQ(got->nbytes(), 0u);
    EXPECT_TRUE(check_within(got->tensors[0], 160).is_ok())
        << describe(indices) << " gave " << describe(got->tensors[0]);
  }
}

// The strides of a view without elements are not bounded by its storage, and a peer's handle may
// have any.
TEST(IndexView, MultipliesNoHugeStrideOfAnEmptyView) {
  const View view{{regular(DType::kUint8, 0, {{0, 1}, {1000, kMost / 2}, {8, kLeast}})}, {}};
  ASSERT_TRUE(check_within(view.tensors[0], 16).is_ok());
  for (const Index& index : std::vector<Index>{std::int64_t{7}, std::int64_t{-1}, Slice{5, {}, 2},
                                               Slice{{}, {}, -3}, list_of({7, 6, 5})}) {
    const std::vector<Index> second = {Slice{}, index};
    EXPECT_EQ(index_view(view, second)->nbytes(), 0u);
    const std::vector<Index> third = {Ellipsis{}, index};
    EXPECT_EQ(index_view(view, third)->nbytes(), 0u);
  }
}

TEST(IndexView, DropsAnAxisForAnIntegerAndKeepsItForASlice) {
  const View view{{contiguous(DType::kFloat32, {4, 16, 64})}, {}};
  const auto shape = [&](std::vector<Index> indices) {
    Result<View> got = index_view(view, indices);
    EXPECT_TRUE(got.is_ok()) << got.status().to_string();
    return got.is_ok() ? got->tensors[0].describe() : std::string();
  };
  EXPECT_EQ(shape({}), "float32[4, 16, 64]");
  EXPECT_EQ(shape({1}), "float32[16, 64]");
  EXPECT_EQ(shape({1, 2, 3}), "float32[]");
  EXPECT_EQ(shape({Ellipsis{}, 3}), "float32[4, 16]");
  EXPECT_EQ(shape({Slice{1, 3, {}}}), "float32[2, 16, 64]");
  EXPECT_EQ(shape({list_of({3, 3, 0}), Ellipsis{}, list_of({-1})}), "float32[3, 16, 1]");
  EXPECT_EQ(shape({Slice{}, Slice{{}, {}, -5}}), "float32[4, 4, 64]");
  EXPECT_EQ(shape({1, 2, 3, Ellipsis{}}), "float32[]");
}

TEST(IndexView, SharesAListThatNeedsNoChange) {
  const View view{{contiguous(DType::kUint8, {100, 8})}, {}};
  const IndexList blocks = list_of({5, 99, 0});
  const std::vector<Index> indices = {blocks};
  Result<View> got = index_view(view, indices);
  ASSERT_TRUE(got.is_ok());
  EXPECT_EQ(got->tensors[0].axes[0].list, blocks);
}

TEST(IndexView, SaysWhichIndexWasWrong) {
  const View view{{contiguous(DType::kUint8, {100, 8})}, {}};
  const auto refusal = [&](std::vector<Index> indices) {
    return index_view(view, indices).status().to_string();
  };
  EXPECT_EQ(refusal({Slice{}, -9}), "OutOfRange: index -9 is out of range for axis 1 of size 8");
  EXPECT_EQ(refusal({list_of({1, 100})}),
            "OutOfRange: index 100 is out of range for axis 0 of size 100");
  EXPECT_EQ(refusal({kLeast}), "OutOfRange: index " + std::to_string(kLeast) +
                                   " is out of range for axis 0 of size 100");
  EXPECT_EQ(refusal({1, 2, 3}), "OutOfRange: 3 indices for uint8[100, 8], which has 2 axes");
  EXPECT_EQ(refusal({Slice{{}, {}, 0}}).substr(0, 15), "InvalidArgument");
  EXPECT_EQ(refusal({Ellipsis{}, Ellipsis{}}).substr(0, 15), "InvalidArgument");
  EXPECT_EQ(refusal({std::string("k")}).substr(0, 15), "InvalidArgument");
  EXPECT_EQ(refusal({NameList{"k"}}).substr(0, 15), "InvalidArgument");
}

TEST(IndexView, RefusesListsThatSelectMoreElementsThanANumberCounts) {
  const auto ids = list_of(std::vector<std::int64_t>(1u << 16, 0));
  const View view{{contiguous(DType::kInt64, {1, 1, 1, 1})}, {}};
  const std::vector<Index> three = {ids, ids, ids};
  EXPECT_TRUE(index_view(view, three).is_ok());
  const std::vector<Index> four = {ids, ids, ids, ids};
  EXPECT_EQ(index_view(view, four).status().code(), Code::kOutOfRange);
}

View some_group() {
  View group;
  for (int layer = 0; layer < 6; ++layer) {
    TensorView tensor = contiguous(DType::kFloat16, {10, 4});
    tensor.offset = layer * 1000;
    tensor.storage = static_cast<std::uint32_t>(layer);
    group.tensors.push_back(tensor);
    group.names.push_back("layer" + std::to_string(layer));
  }
  return group;
}

TEST(IndexView, PicksATensorOfAGroupByItsName) {
  const View group = some_group();
  const std::vector<Index> indices = {std::string("layer3"), std::int64_t{2}};
  Result<View> got = index_view(group, indices);
  ASSERT_TRUE(got.is_ok()) << got.status().to_string();
  EXPECT_FALSE(got->is_group());
  ASSERT_EQ(got->tensors.size(), 1u);
  EXPECT_EQ(got->tensors[0].describe(), "float16[4]");
  EXPECT_EQ(got->tensors[0].offset, 3016);
  EXPECT_EQ(got->tensors[0].storage, 3u);
}

TEST(IndexView, PicksTensorsOfAGroupByAListOfNamesInItsOrder) {
  const View group = some_group();
  const std::vector<Index> indices = {NameList{"layer4", "layer1"}, list_of({0, 9})};
  Result<View> got = index_view(group, indices);
  ASSERT_TRUE(got.is_ok()) << got.status().to_string();
  EXPECT_EQ(got->names, (std::vector<std::string>{"layer4", "layer1"}));
  ASSERT_EQ(got->tensors.size(), 2u);
  EXPECT_EQ(got->tensors[0].storage, 4u);
  EXPECT_EQ(got->tensors[1].storage, 1u);
  EXPECT_EQ(got->tensors[1].describe(), "float16[2, 4]");
  // One name in a list is still a group.
  const std::vector<Index> one = {NameList{"layer0"}};
  EXPECT_TRUE(index_view(group, one)->is_group());
}

TEST(IndexView, PicksTensorsOfAGroupByASlice) {
  const View group = some_group();
  const auto names = [&](Slice slice) {
    const std::vector<Index> indices = {slice};
    Result<View> got = index_view(group, indices);
    std::string out;
    if (!got.is_ok()) return std::string(code_name(got.status().code()));
    for (std::size_t i = 0; i < got->names.size(); ++i) {
      EXPECT_EQ("layer" + std::to_string(got->tensors[i].storage), got->names[i]);
      out += got->names[i].back();
    }
    return out;
  };
  EXPECT_EQ(names({}), "012345");
  EXPECT_EQ(names({1, 3, {}}), "12");
  EXPECT_EQ(names({-2, {}, {}}), "45");
  EXPECT_EQ(names({{}, {}, -2}), "531");
  EXPECT_EQ(names({kMost, kLeast, kLeast}), "5");
  EXPECT_EQ(names({kLeast, kMost, kMost}), "0");
  EXPECT_EQ(names({3, 3, {}}), "InvalidArgument");
  EXPECT_EQ(names({{}, {}, 0}), "InvalidArgument");
}

TEST(IndexView, AppliesWhatFollowsAnEllipsisToAllTensorsOfAGroup) {
  const View group = some_group();
  const std::vector<Index> indices = {Ellipsis{}, std::int64_t{1}};
  Result<View> got = index_view(group, indices);
  ASSERT_TRUE(got.is_ok()) << got.status().to_string();
  ASSERT_EQ(got->tensors.size(), 6u);
  EXPECT_EQ(got->names, group.names);
  for (const TensorView& tensor : got->tensors) EXPECT_EQ(tensor.describe(), "float16[10]");
  EXPECT_EQ(index_view(group, {})->tensors.size(), 6u);
}

TEST(IndexView, RefusesWhatDoesNotPickTensorsOfAGroup) {
  const View group = some_group();
  const auto refusal = [&](std::vector<Index> indices) {
    return index_view(group, indices).status();
  };
  EXPECT_EQ(refusal({std::string("layer9")}).code(), Code::kOutOfRange);
  EXPECT_NE(refusal({std::string("layer9")}).text().find("'layer9'"), std::string_view::npos);
  EXPECT_EQ(refusal({NameList{"layer1", ""}}).code(), Code::kOutOfRange);
  EXPECT_EQ(refusal({NameList{}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(refusal({std::int64_t{0}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(refusal({list_of({0})}).code(), Code::kInvalidArgument);
  const Status inner = refusal({std::string("layer1"), std::int64_t{10}});
  EXPECT_EQ(inner.code(), Code::kOutOfRange);
  EXPECT_NE(inner.text().find("'layer1'"), std::string_view::npos);
  EXPECT_EQ(refusal({Slice{}, Slice{{}, {}, 0}}).code(), Code::kInvalidArgument);
}

// --- check_within ---

TEST(CheckWithin, AgreesWithTheModelOnRandomViews) {
  test::Random random(99);
  KVZC_TRACE_SEED(random);
  int refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    TensorView view = random_view(random);
    for (Axis& axis : view.axes) {
      if (axis.size == 0 || !random.one_in(4)) continue;
      std::vector<std::int64_t> ids;
      for (std::int64_t i = 1; i < axis.size; ++i) ids.push_back(random.between(-3, 6));
      // The first position of an axis lies in its storage, also where nothing is taken from it.
      ids.insert(ids.begin() + random.between(0, axis.size - 1), 0);
      axis.list = list_of(std::move(ids));
    }
    const std::uint64_t needed = settle(&view, 0);
    const std::int64_t offset = view.offset;
    for (const std::int64_t moved : {-1, 0, 1, 5}) {
      for (const std::int64_t spare : {-1, 0, 1, 5}) {
        if (spare < 0 && needed == 0) continue;
        view.offset = offset + moved;
        const bool fits = moved >= 0 && moved <= spare;
        refused += fits ? 0 : 1;
        ASSERT_EQ(check_within(view, needed + static_cast<std::uint64_t>(spare)).is_ok(), fits)
            << describe(view) << " in " << needed << " + " << spare << " bytes";
      }
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(CheckWithin, RefusesWhatWouldWrap) {
  constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
  const std::vector<TensorView> wrapping = {
      // The number of elements, or of bytes.
      regular(DType::kUint8, 0, {{std::int64_t{1} << 32, 0}, {std::int64_t{1} << 31, 0}}),
      regular(DType::kInt64, 0, {{std::int64_t{1} << 60, 0}}),
      regular(DType::kUint8, 0, {{kMost, 0}, {2, 0}}),
      // Also where another axis has none.
      regular(DType::kUint8, 0, {{0, 0}, {std::int64_t{1} << 32, 0}, {std::int64_t{1} << 31, 0}}),
      // The distance of the last position.
      regular(DType::kUint8, 0, {{3, kMost}}),
      regular(DType::kUint8, kMost, {{3, kLeast}}),
      regular(DType::kUint8, 0, {{std::int64_t{1} << 32, std::int64_t{1} << 32}}),
      // The sum of two, or with the offset, or with the element itself.
      regular(DType::kUint8, 0, {{2, kMost}, {2, kMost}}),
      regular(DType::kUint8, kMost, {{2, kLeast}, {2, kLeast}}),
      regular(DType::kUint8, kMost - 1, {{2, 2}}),
      regular(DType::kUint8, kMost, {}),
      regular(DType::kInt64, kMost - 7, {}),
      // Below the storage.
      regular(DType::kUint8, -1, {}),
      regular(DType::kUint8, kLeast, {}),
      regular(DType::kUint8, 0, {{2, -1}}),
      regular(DType::kUint8, kMost - 1, {{2, kLeast}}),
      regular(DType::kUint8, kLeast, {{2, kMost}, {2, kMost}}),
      // No sizes at all.
      regular(DType::kUint8, 0, {{-1, 1}}),
      regular(DType::kUint8, 0, {{kLeast, 0}}),
      regular(DType::kUint8, 0, {{0, 1}, {-5, 1}}),
  };
  for (const TensorView& view : wrapping) {
    EXPECT_EQ(check_within(view, kAll).code(), Code::kOutOfRange) << describe(view);
    EXPECT_EQ(check_within(view, 100).code(), Code::kOutOfRange) << describe(view);
  }
}

TEST(CheckWithin, TakesTheLargestThatFits) {
  EXPECT_TRUE(check_within(regular(DType::kUint8, kMost - 1, {}), static_cast<std::uint64_t>(kMost))
                  .is_ok());
  EXPECT_TRUE(
      check_within(regular(DType::kUint8, 0, {{2, kMost - 1}}), static_cast<std::uint64_t>(kMost))
          .is_ok());
  EXPECT_TRUE(check_within(regular(DType::kUint8, kMost - 1, {{2, -(kMost - 1)}}),
                           static_cast<std::uint64_t>(kMost))
                  .is_ok());
  EXPECT_FALSE(check_within(regular(DType::kUint8, 0, {{2, kMost - 1}}),
                            static_cast<std::uint64_t>(kMost) - 1)
                   .is_ok());
  // A single position never steps.
  EXPECT_TRUE(check_within(regular(DType::kUint8, 0, {{1, kLeast}, {1, kMost}}), 1).is_ok());
}

TEST(CheckWithin, LooksAtTheLeastAndTheMostOfAList) {
  TensorView view = regular(DType::kUint8, 10, {{3, 5}});
  view.axes[0].list = list_of({1, -2, 0});
  EXPECT_TRUE(check_within(view, 16).is_ok());
  EXPECT_FALSE(check_within(view, 15).is_ok());
  view.offset = 9;
  EXPECT_FALSE(check_within(view, 16).is_ok());
  view.axes[0].list = list_of({0, kMost, 1});
  EXPECT_FALSE(check_within(view, ~std::uint64_t{0}).is_ok());
  view.axes[0].list = list_of({0, kLeast, 1});
  EXPECT_FALSE(check_within(view, ~std::uint64_t{0}).is_ok());
}

TEST(CheckWithin, TakesAnEmptyViewAtTheEndAndNotBeyondIt) {
  EXPECT_TRUE(check_within(regular(DType::kFloat32, 16, {{0, 4}}), 16).is_ok());
  EXPECT_TRUE(check_within(regular(DType::kFloat32, 0, {{0, 4}}), 0).is_ok());
  EXPECT_FALSE(check_within(regular(DType::kFloat32, 17, {{0, 4}}), 16).is_ok());
  EXPECT_FALSE(check_within(regular(DType::kFloat32, -1, {{0, 4}}), 16).is_ok());
}

// --- cut_runs ---

struct ElementPair {
  std::int64_t local;
  std::int64_t remote;
  bool operator==(const ElementPair&) const = default;
};

// The pairs in index order, but axes that run backwards on both sides are walked forwards.
std::vector<ElementPair> pairs_of(TensorView local, TensorView remote) {
  for (std::size_t i = 0; i < local.axes.size(); ++i) {
    Axis& a = local.axes[i];
    Axis& b = remote.axes[i];
    if (a.list || b.list || a.stride >= 0 || b.stride >= 0 || a.size < 2) continue;
    local.offset += (a.size - 1) * a.stride;
    remote.offset += (b.size - 1) * b.stride;
    a.stride = -a.stride;
    b.stride = -b.stride;
  }
  const std::vector<std::int64_t> locals = offsets_of(local);
  const std::vector<std::int64_t> remotes = offsets_of(remote);
  std::vector<ElementPair> out;
  for (std::size_t i = 0; i < locals.size(); ++i) out.push_back({locals[i], remotes[i]});
  return out;
}

void expect_exact_runs(const TensorView& local, const TensorView& remote, const std::string& what) {
  const std::int64_t item = dtype_nbytes(local.dtype);
  // Runs are only computed, never followed, so the memory need not be there.
  static std::byte memory[1 << 16];
  const Run before{memory, 7, 9};
  std::vector<Run> runs = {before};
  const std::uint64_t pieces = cut_runs(local, memory, remote, runs);
  ASSERT_TRUE(runs[0].local == before.local && runs[0].remote == 7 && runs[0].nbytes == 9) << what;
  runs.erase(runs.begin());
  ASSERT_GE(pieces, runs.size()) << what;
  if (pieces > 0) {
    std::vector<Run> none;
    EXPECT_EQ(cut_runs(local, memory, remote, none, pieces - 1), pieces) << what;
    EXPECT_TRUE(none.empty()) << what;
    EXPECT_EQ(cut_runs(local, memory, remote, none, pieces), pieces) << what;
    EXPECT_EQ(none.size(), runs.size()) << what;
  }

  if (const std::optional<Run> one = one_run(local, memory, remote)) {
    ASSERT_EQ(runs.size(), 1u) << what;
    EXPECT_EQ(one->local, runs[0].local) << what;
    EXPECT_EQ(one->remote, runs[0].remote) << what;
    EXPECT_EQ(one->nbytes, runs[0].nbytes) << what;
  }

  std::vector<ElementPair> got;
  for (const Run& run : runs) {
    ASSERT_GT(run.nbytes, 0u) << what;
    ASSERT_EQ(run.nbytes % static_cast<std::uint64_t>(item), 0u) << what;
    for (std::uint64_t at = 0; at < run.nbytes; at += static_cast<std::uint64_t>(item)) {
      got.push_back({run.local - memory + static_cast<std::int64_t>(at),
                     static_cast<std::int64_t>(run.remote + at)});
    }
  }
  // They may come in any order.
  std::vector<ElementPair> expected = pairs_of(local, remote);
  for (std::vector<ElementPair>* each : {&got, &expected}) {
    std::sort(each->begin(), each->end(), [](const ElementPair& a, const ElementPair& b) {
      return std::tie(a.local, a.remote) < std::tie(b.local, b.remote);
    });
  }
  ASSERT_EQ(got, expected) << what;
  for (std::size_t i = 1; i < runs.size(); ++i) {
    ASSERT_FALSE(runs[i - 1].local + runs[i - 1].nbytes == runs[i].local &&
                 runs[i - 1].remote + runs[i - 1].nbytes == runs[i].remote)
        << what << ": runs " << i - 1 << " and " << i << " continue each other on both sides";
  }
}

TEST(OneRun, IsGivenForTwoContiguousViewsThatFitAndForNoOthers) {
  std::byte memory[4096];
  const auto runs_as_one = [&](const TensorView& local, const TensorView& remote) {
    return one_run(local, memory, remote).has_value();
  };
  TensorView here = contiguous(DType::kFloat32, {4, 5});
  TensorView there = here;
  here.offset = 16;
  there.offset = 32;
  const auto run = one_run(here, memory, there);
  ASSERT_TRUE(run.has_value());
  EXPECT_EQ(run->local, memory + 16);
  EXPECT_EQ(run->remote, 32u);
  EXPECT_EQ(run->nbytes, 80u);

  // Nobody walks an axis of one position, whatever its stride.
  TensorView single = contiguous(DType::kFloat32, {4, 1, 5});
  single.axes[1].stride = 12345;
  EXPECT_TRUE(runs_as_one(single, contiguous(DType::kFloat32, {4, 1, 5})));
  EXPECT_TRUE(runs_as_one(contiguous(DType::kFloat32, {}), contiguous(DType::kFloat32, {})));

  EXPECT_FALSE(runs_as_one(here, contiguous(DType::kInt32, {4, 5})));
  EXPECT_FALSE(runs_as_one(here, contiguous(DType::kFloat32, {5, 4})));
  EXPECT_FALSE(runs_as_one(here, contiguous(DType::kFloat32, {20})));
  EXPECT_FALSE(runs_as_one(contiguous(DType::kFloat32, {4, 0}), contiguous(DType::kFloat32, {4, 0})));
  for (const std::size_t axis : {std::size_t{0}, std::size_t{1}}) {
    TensorView strided = there;
    strided.axes[axis].stride *= 2;
    EXPECT_FALSE(runs_as_one(here, strided));
    EXPECT_FALSE(runs_as_one(strided, here));
    TensorView backwards = there;
    backwards.axes[axis].stride *= -1;
    EXPECT_FALSE(runs_as_one(here, backwards));
    EXPECT_FALSE(runs_as_one(backwards, here));
    TensorView listed = there;
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < listed.axes[axis].size; ++i) ids.push_back(i);
    listed.axes[axis].list = list_of(ids);
    EXPECT_FALSE(runs_as_one(here, listed));
    EXPECT_FALSE(runs_as_one(listed, here));
  }
}

// Views as indexing makes them: a dense tensor, cut by slices and lists, at times transposed.
TensorView random_side(test::Random& random, DType dtype, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> around = shape;
  std::vector<std::size_t> order(shape.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (random.one_in(4)) std::shuffle(order.begin(), order.end(), random.engine);
  for (std::int64_t& size : around) {
    if (random.one_in(3)) size = size * 2 + 1;
  }
  TensorView out;
  out.dtype = dtype;
  out.axes.resize(shape.size());
  std::int64_t stride = dtype_nbytes(dtype);
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::size_t at = order[i];
    Axis& axis = out.axes[at];
    axis.size = shape[at];
    axis.stride = stride;
    const std::int64_t room = around[at];
    stride *= room;
    switch (random.between(0, 9)) {
      case 0:
        axis.stride = -axis.stride;
        break;
      case 1:
        if (room > shape[at]) axis.stride *= 2;
        break;
      case 2:
        axis.stride = 0;
        break;
      case 3:
      case 4: {
        std::vector<std::int64_t> ids;
        if (random.one_in(2)) {
          for (std::int64_t id = 0; id < axis.size; ++id) ids.push_back(id + room - axis.size);
          if (random.one_in(3)) std::reverse(ids.begin(), ids.end());
        } else {
          for (std::int64_t id = 0; id < axis.size; ++id)
            ids.push_back(random.between(0, room - 1));
        }
        axis.list = list_of(std::move(ids));
        break;
      }
      default:
        break;
    }
  }
  settle(&out, random.between(0, 20));
  return out;
}

TEST(CutRuns, PairsExactlyTheElementsAndMergesAllNeighbours) {
  test::Random random(4711);
  KVZC_TRACE_SEED(random);
  for (int round = 0; round < 60'000; ++round) {
    std::vector<std::int64_t> shape;
    for (std::int64_t axes = random.between(0, 4); axes > 0; --axes) {
      shape.push_back(random.one_in(30) ? 0 : random.between(1, 4));
    }
    const DType dtype = random.pick(kSomeDTypes);
    const TensorView local = random_side(random, dtype, shape);
    TensorView remote = random_side(random, dtype, shape);
    // Often alike, so that there is something to merge.
    if (random.one_in(3)) remote.axes = local.axes;
    if (random.one_in(3)) {
      for (std::size_t i = 0; i < shape.size(); ++i) {
        if (random.one_in(2)) remote.axes[i] = local.axes[i];
      }
    }
    settle(&remote, random.between(0, 20));
    const std::string what =
        "round " + std::to_string(round) + ": " + describe(local) + " with " + describe(remote);
    expect_exact_runs(local, remote, what);
    if (HasFatalFailure()) return;
  }
}

std::size_t run_count(const TensorView& local, const TensorView& remote) {
  static std::byte memory[1 << 20];
  std::vector<Run> runs;
  EXPECT_GE(cut_runs(local, memory, remote, runs), runs.size());
  return runs.size();
}

TEST(CutRuns, GivesOneRunForAContiguousPair) {
  for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
           {}, {1}, {7}, {2, 3}, {4, 1, 5}, {2, 3, 4, 5}, {1, 1, 1}, {2, 1, 1, 3, 1}}) {
    for (const DType dtype : kSomeDTypes) {
      TensorView remote = contiguous(dtype, shape);
      remote.offset = 48;
      EXPECT_EQ(run_count(contiguous(dtype, shape), remote), 1u) << remote.describe();
    }
  }
}

TEST(CutRuns, GivesOneRunForAPairThatBothSidesHavePermutedAlike) {
  std::vector<std::int64_t> order = {0, 1, 2, 3};
  do {
    View local, remote;
    local.tensors.push_back(contiguous(DType::kFloat16, {3, 4, 5, 6}));
    remote.tensors.push_back(local.tensors[0]);
    remote.tensors[0].offset = 96;
    EXPECT_EQ(run_count(permute_view(local, order)->tensors[0], permute_view(remote, order)->tensors[0]),
              1u);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(CutRuns, GivesNoRunForAnEmptyPair) {
  EXPECT_EQ(run_count(contiguous(DType::kFloat32, {3, 0}), contiguous(DType::kFloat32, {3, 0})),
            0u);
  TensorView strange = regular(DType::kUint8, 0, {{1000, kMost / 2}, {3, kLeast}, {0, 1}});
  ASSERT_TRUE(check_within(strange, 16).is_ok());
  EXPECT_EQ(run_count(contiguous(DType::kUint8, {1000, 3, 0}), strange), 0u);
}

TEST(CutRuns, GivesOneRunPerBlockAndMergesConsecutiveBlocks) {
  const View cache{{contiguous(DType::kBfloat16, {64, 16, 8})}, {}};
  const auto blocks = [&](std::vector<std::int64_t> ids) {
    const std::vector<Index> indices = {list_of(std::move(ids))};
    return index_view(cache, indices)->tensors[0];
  };
  EXPECT_EQ(run_count(blocks({1, 3, 5}), blocks({1, 3, 5})), 3u);
  EXPECT_EQ(run_count(blocks({1, 2, 3}), blocks({7, 8, 9})), 1u);
  EXPECT_EQ(run_count(blocks({1, 2, 3}), blocks({7, 9, 10})), 2u);
  EXPECT_EQ(run_count(blocks({1, 2, 4, 5}), blocks({7, 8, 9, 10})), 2u);
  EXPECT_EQ(run_count(blocks({3, 2, 1}), blocks({9, 8, 7})), 3u);
}

TEST(CutRuns, GivesOneRunForAPairThatRunsBackwardsOnBothSides) {
  const View cache{{contiguous(DType::kFloat32, {64})}, {}};
  const std::vector<Index> backwards = {Slice{{}, {}, -1}};
  const TensorView view = index_view(cache, backwards)->tensors[0];
  EXPECT_EQ(run_count(view, view), 1u);
  EXPECT_EQ(run_count(view, cache.tensors[0]), 64u);
}

// --- check_no_overlap ---

bool overlaps_by_bytes(const TensorView& view) {
  std::set<std::int64_t> bytes;
  for (const std::int64_t at : offsets_of(view)) {
    for (std::int64_t i = 0; i < dtype_nbytes(view.dtype); ++i) {
      if (!bytes.insert(at + i).second) return true;
    }
  }
  return false;
}

TEST(CheckNoOverlap, AgreesWithAMapOfAllBytes) {
  test::Random random(31337);
  KVZC_TRACE_SEED(random);
  int overlapping = 0;
  int disjoint = 0;
  for (int round = 0; round < 40'000; ++round) {
    TensorView view;
    if (random.one_in(2)) {
      view = random_view(random);
      // Small strides, so that elements interleave and overlap in part.
      if (random.one_in(2)) {
        for (Axis& axis : view.axes) axis.stride = random.between(-12, 12);
      }
      for (Axis& axis : view.axes) {
        if (axis.size == 0 || !random.one_in(3)) continue;
        std::vector<std::int64_t> ids(8);
        for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
        std::shuffle(ids.begin(), ids.end(), random.engine);
        ids.resize(static_cast<std::size_t>(axis.size));
        if (random.one_in(6)) ids.back() = ids.front();
        axis.list = list_of(std::move(ids));
      }
      settle(&view, random.between(0, 9));
    } else {
      std::vector<std::int64_t> shape;
      for (std::int64_t axes = random.between(0, 3); axes > 0; --axes) {
        shape.push_back(random.between(0, 5));
      }
      for (std::int64_t& size : shape)
        size = random.one_in(15) ? 0 : std::max<std::int64_t>(size, 1);
      view = random_side(random, random.pick(kSomeDTypes), shape);
    }
    const bool expected = overlaps_by_bytes(view);
    (expected ? overlapping : disjoint) += 1;
    const Status status = check_no_overlap(view);
    ASSERT_EQ(status.is_ok(), !expected) << "round " << round << ": " << describe(view);
    if (expected) {
      ASSERT_EQ(status.code(), Code::kInvalidArgument);
    }
  }
  EXPECT_GT(overlapping, 5000);
  EXPECT_GT(disjoint, 5000);
}

TEST(CheckNoOverlap, NamesThePositionThatAListHasTwice) {
  TensorView view = contiguous(DType::kUint8, {3, 4});
  view.axes[0].list = list_of({2, 0, 2});
  const Status status = check_no_overlap(view);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.text().find("position 2 "), std::string_view::npos) << status.text();
}

TEST(CheckNoOverlap, TakesTensorsThatInterleave) {
  // Every other element twice, of rows that lie in each other.
  EXPECT_TRUE(check_no_overlap(regular(DType::kFloat32, 0, {{2, 4}, {8, 8}})).is_ok());
  EXPECT_TRUE(check_no_overlap(regular(DType::kFloat32, 0, {{8, 8}, {2, 4}})).is_ok());
  // In each other, and yet apart: distances of 3, 5 and 8 bytes.
  EXPECT_TRUE(check_no_overlap(regular(DType::kUint8, 0, {{2, 3}, {2, 5}})).is_ok());
  EXPECT_FALSE(check_no_overlap(regular(DType::kUint8, 0, {{3, 3}, {4, 2}})).is_ok());
}

// As `torch.zeros(1).expand(2**40)`: it takes one look at the strides to see that it overlaps.
#if !KVZC_SANITIZED
TEST(CheckNoOverlap, RefusesAnExpandedTargetOfAnySizeAtOnce) {
  test::Child child(
      [] {
        const rlimit memory{1u << 30, 1u << 30};
        KVZC_CHILD_CHECK(setrlimit(RLIMIT_AS, &memory) == 0);
        try {
          KVZC_CHILD_CHECK(
              !check_no_overlap(regular(DType::kFloat32, 0, {{std::int64_t{1} << 40, 0}})).is_ok());
          KVZC_CHILD_CHECK(
              !check_no_overlap(regular(DType::kFloat32, 0, {{1 << 20, 4}, {1 << 20, 4}})).is_ok());
        } catch (const std::bad_alloc&) {
          KVZC_CHILD_CHECK(!"out of memory");
        }
        return 0;
      },
      5);
  EXPECT_EQ(child.wait(), "exit 0");
}
#endif

// --- permute_view, view_as ---

// Some indexed view, not seldom with lists, and the size of its storage.
TensorView random_indexed(test::Random& random, std::uint64_t* storage_nbytes) {
  for (;;) {
    TensorView tensor = random_view(random);
    *storage_nbytes = settle(&tensor, random.between(0, 40));
    tensor.storage = 5;
    Result<View> indexed = index_view(View{{tensor}, {}}, random_indices(random, tensor.shape()));
    if (indexed.is_ok()) return indexed->tensors[0];
  }
}

TEST(PermuteView, PutsAxesIntoAnotherOrderAndElementsWithThem) {
  test::Random random(20251);
  KVZC_TRACE_SEED(random);
  for (int round = 0; round < 5'000; ++round) {
    std::uint64_t storage_nbytes;
    const TensorView view = random_indexed(random, &storage_nbytes);
    const std::size_t count = view.axes.size();
    std::vector<std::int64_t> order;
    for (std::size_t i = 0; i < count; ++i) order.push_back(static_cast<std::int64_t>(i));
    std::shuffle(order.begin(), order.end(), random.engine);
    std::vector<std::int64_t> dims = order;
    for (std::int64_t& dim : dims) {
      if (random.one_in(3)) dim -= static_cast<std::int64_t>(count);
    }
    Result<View> got = permute_view(View{{view}, {}}, dims);
    ASSERT_TRUE(got.is_ok()) << describe(view) << ": " << got.status().to_string();
    const TensorView& permuted = got->tensors[0];
    ASSERT_EQ(permuted.dtype, view.dtype);
    ASSERT_EQ(permuted.storage, 5u);
    ASSERT_EQ(permuted.axes.size(), count);
    ASSERT_TRUE(check_within(permuted, storage_nbytes).is_ok()) << describe(permuted);
    // Element (i, j, ...) of the result is the one at those places of the axes that it took.
    const std::vector<std::int64_t> before = offsets_of(view);
    const std::vector<std::int64_t> after = offsets_of(permuted);
    ASSERT_EQ(after.size(), before.size());
    std::vector<std::int64_t> at(count, 0);
    for (const std::int64_t offset : after) {
      std::int64_t flat = 0;
      for (std::size_t axis = 0; axis < count; ++axis) {
        const auto place = std::find(order.begin(), order.end(), static_cast<std::int64_t>(axis));
        flat = flat * view.axes[axis].size + at[static_cast<std::size_t>(place - order.begin())];
      }
      ASSERT_EQ(offset, before[static_cast<std::size_t>(flat)]) << describe(view);
      for (std::size_t axis = count; axis > 0; --axis) {
        if (++at[axis - 1] < permuted.axes[axis - 1].size) break;
        at[axis - 1] = 0;
      }
    }
  }
}

TEST(PermuteView, NamesEachAxisOnce) {
  const View view{{contiguous(DType::kFloat32, {2, 3, 4})}, {}};
  const auto code = [&view](std::vector<std::int64_t> dims) {
    return permute_view(view, dims).status().code();
  };
  EXPECT_EQ(code({2, 0, 1}), Code::kOk);
  EXPECT_EQ(code({-1, -3, 1}), Code::kOk);
  EXPECT_EQ(code({0, 1}), Code::kInvalidArgument);
  EXPECT_EQ(code({}), Code::kInvalidArgument);
  EXPECT_EQ(code({0, 1, 2, 0}), Code::kInvalidArgument);
  EXPECT_EQ(code({0, 1, 1}), Code::kInvalidArgument);
  EXPECT_EQ(code({0, 1, -2}), Code::kInvalidArgument);
  EXPECT_EQ(code({0, 1, 3}), Code::kOutOfRange);
  EXPECT_EQ(code({0, 1, -4}), Code::kOutOfRange);
  EXPECT_EQ(code({kLeast, kMost, 0}), Code::kOutOfRange);
  EXPECT_TRUE(permute_view(View{{contiguous(DType::kUint8, {})}, {}}, {}).is_ok());
}

TEST(PermuteView, OfAGroupIsThatOfEachTensorAndSaysWhichCannot) {
  View group{{contiguous(DType::kFloat32, {2, 3}), contiguous(DType::kUint8, {5, 7})}, {"k", "v"}};
  const std::vector<std::int64_t> dims = {1, 0};
  Result<View> got = permute_view(group, dims);
  ASSERT_TRUE(got.is_ok());
  EXPECT_EQ(got->names, group.names);
  EXPECT_EQ(got->tensors[0].shape(), (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(got->tensors[1].shape(), (std::vector<std::int64_t>{7, 5}));
  group.tensors[1] = contiguous(DType::kUint8, {5});
  const Status status = permute_view(group, dims).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.text().find("'v'"), std::string_view::npos) << status.text();
}

// The offset of every byte, in the order of the elements.
std::vector<std::int64_t> byte_offsets_of(const TensorView& view) {
  std::vector<std::int64_t> out;
  for (const std::int64_t at : offsets_of(view)) {
    for (std::int64_t i = 0; i < view.dtype.nbytes(); ++i) out.push_back(at + i);
  }
  return out;
}

TEST(ViewAs, IsTheSameBytesInTheSameOrderOrARefusal) {
  test::Random random(20252);
  KVZC_TRACE_SEED(random);
  std::vector<DType> types = kSomeDTypes;
  types.push_back(*record_dtype(3, "three"));
  types.push_back(*record_dtype(6, "six"));
  int refused = 0;
  int resized = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::uint64_t storage_nbytes;
    const TensorView view = random_indexed(random, &storage_nbytes);
    const DType dtype = random.pick(types);
    const std::string what = describe(view) + " as " + dtype_name(dtype);
    const std::int64_t last = view.axes.empty() ? 1 : view.axes.back().size;
    const std::int64_t last_nbytes = last * view.dtype.nbytes();
    bool is_possible = dtype.nbytes() == view.dtype.nbytes();
    if (!is_possible && !view.axes.empty()) {
      const bool is_contiguous =
          view.numel() == 0 || last == 1 ||
          (!view.axes.back().list && view.axes.back().stride == view.dtype.nbytes());
      is_possible = is_contiguous && last_nbytes % dtype.nbytes() == 0;
    }
    Result<View> got = view_as(View{{view}, {}}, dtype);
    ASSERT_EQ(got.is_ok(), is_possible) << what << ": " << got.status().to_string();
    if (!is_possible) {
      ++refused;
      ASSERT_EQ(got.status().code(), Code::kInvalidArgument);
      continue;
    }
    const TensorView& out = got->tensors[0];
    std::vector<std::int64_t> shape = view.shape();
    if (!shape.empty()) shape.back() = last_nbytes / dtype.nbytes();
    if (dtype.nbytes() != view.dtype.nbytes()) ++resized;
    ASSERT_EQ(out.shape(), shape) << what;
    ASSERT_EQ(out.dtype, dtype) << what;
    ASSERT_EQ(out.storage, 5u) << what;
    ASSERT_EQ(byte_offsets_of(out), byte_offsets_of(view)) << what;
    ASSERT_TRUE(check_within(out, storage_nbytes).is_ok()) << what;
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(resized, 1000);
}

TEST(ViewAs, RefusesWithTheRemedy) {
  const auto text = [](const TensorView& view, DType dtype) {
    return std::string(view_as(View{{view}, {}}, dtype).status().text());
  };
  const auto says = [&text](const TensorView& view, DType dtype, std::string_view part) {
    const std::string whole = text(view, dtype);
    EXPECT_NE(whole.find(part), std::string::npos) << whole;
  };
  says(contiguous(DType::kFloat32, {}), DType::kUint8, "no axis");
  says(contiguous(DType::kUint8, {4, 3}), DType::kUint16, "3 bytes, no multiple of 2");
  says(regular(DType::kFloat32, 0, {{4, 4}, {3, 16}}), DType::kUint8, "index or permute it then");
  says(regular(DType::kFloat32, 0, {{4, 0}}), DType::kUint8, "not contiguous");
  TensorView listed = contiguous(DType::kFloat32, {4});
  listed.axes[0].list = list_of({0, 1, 2, 3});
  says(listed, DType::kUint8, "not contiguous");
  const View group{{contiguous(DType::kFloat32, {2}), contiguous(DType::kFloat32, {3})},
                   {"k", "v"}};
  EXPECT_NE(view_as(group, DType::kFloat64).status().text().find("'v'"), std::string_view::npos);
  Result<View> bytes = view_as(group, DType::kUint8);
  ASSERT_TRUE(bytes.is_ok());
  EXPECT_EQ(bytes->names, group.names);
  EXPECT_EQ(bytes->tensors[1].shape(), std::vector<std::int64_t>{12});
}

TEST(ViewAs, OfAnEmptyViewDoesNotWrap) {
  const TensorView huge = regular(DType::kUint8, 0, {{kMost / 4, 0}, {0, 1}});
  EXPECT_TRUE(extent_of(huge).is_ok());
  EXPECT_EQ(view_as(View{{huge}, {}}, DType::kComplex128).status().code(), Code::kOutOfRange);
  EXPECT_TRUE(view_as(View{{huge}, {}}, DType::kUint16).is_ok());
}

// --- check_same_layout ---

TEST(CheckSameLayout, WantsTheSameNumberOfTensorsAndTheSameShapesAndDTypes) {
  const auto code = [](const View& a, const View& b) { return check_same_layout(a, b).code(); };
  const View one{{contiguous(DType::kFloat32, {4, 8})}, {}};
  EXPECT_EQ(code(one, one), Code::kOk);
  // Strides, offsets, storages and lists do not matter.
  TensorView other = regular(DType::kFloat32, 400, {{4, -100}, {8, 0}});
  other.storage = 9;
  other.axes[0].list = list_of({1, 1, 2, 0});
  EXPECT_EQ(code(one, View{{other}, {}}), Code::kOk);
  for (const TensorView& different :
       {contiguous(DType::kInt32, {4, 8}), contiguous(DType::kFloat32, {4, 7}),
        contiguous(DType::kFloat32, {8, 4}), contiguous(DType::kFloat32, {32}),
        contiguous(DType::kFloat32, {1, 4, 8}), contiguous(DType::kFloat32, {4, 8, 1}),
        contiguous(DType::kFloat32, {})}) {
    EXPECT_EQ(code(one, View{{different}, {}}), Code::kLayoutMismatch) << different.describe();
    EXPECT_EQ(code(View{{different}, {}}, one), Code::kLayoutMismatch) << different.describe();
  }
}

TEST(CheckSameLayout, ComparesGroupsTensorByTensorWhateverTheirNames) {
  const View group = some_group();
  View renamed = group;
  for (std::string& name : renamed.names) name += "x";
  EXPECT_TRUE(check_same_layout(group, renamed).is_ok());
  View shorter = group;
  shorter.tensors.pop_back();
  shorter.names.pop_back();
  EXPECT_EQ(check_same_layout(group, shorter).code(), Code::kLayoutMismatch);
  View different = group;
  different.tensors[4] = contiguous(DType::kFloat16, {10, 5});
  const Status status = check_same_layout(group, different);
  EXPECT_EQ(status.code(), Code::kLayoutMismatch);
  EXPECT_NE(status.text().find("'layer4'"), std::string_view::npos) << status.text();
  EXPECT_NE(status.text().find("float16[10, 5]"), std::string_view::npos) << status.text();
}

// --- dtypes ---

TEST(DType, HasANameASizeAndANumberEach) {
  int count = 0;
  for (int number = 0; number < 256; ++number) {
    const auto dtype = dtype_from_wire(static_cast<std::uint8_t>(number));
    if (!dtype) continue;
    ++count;
    EXPECT_EQ(dtype->number(), number);
    EXPECT_EQ(dtype_from_name(dtype_name(*dtype)), dtype);
    EXPECT_GT(dtype_nbytes(*dtype), 0u);
  }
  EXPECT_EQ(count, DType::kFloat4E2m1fnX2 + 1);
  EXPECT_FALSE(dtype_from_name("float").has_value());
  EXPECT_FALSE(dtype_from_name("").has_value());
  EXPECT_EQ(dtype_nbytes(DType::kBfloat16), 2u);
  // The numbers travel.
  EXPECT_EQ(static_cast<int>(DType::kBfloat16), 10);
  EXPECT_EQ(static_cast<int>(DType::kFloat8E4m3fn), 15);
  EXPECT_EQ(static_cast<int>(DType::kComplex32), 20);
  EXPECT_EQ(static_cast<int>(DType::kFloat4E2m1fnX2), 24);
}

TEST(DType, ARecordIsWhatItsSizeAndDescriptionSay) {
  const DType record = *record_dtype(24, "k at 0, v at 12");
  EXPECT_TRUE(record.is_record());
  EXPECT_EQ(record.nbytes(), 24u);
  EXPECT_EQ(record, *record_dtype(24, "k at 0, v at 12"));
  EXPECT_NE(record, *record_dtype(24, "k at 0, v at 16"));
  EXPECT_NE(record, *record_dtype(25, "k at 0, v at 12"));
  EXPECT_NE(*record_dtype(1, ""), DType(DType::kUint8));
  EXPECT_EQ(record_dtype(0, "nothing").status().code(), Code::kInvalidArgument);
  // The fingerprint travels: the beginning of the SHA-256 of "abc".
  EXPECT_EQ(dtype_name(*record_dtype(4294967295, "abc")), "record4294967295-ba7816bf8f01cfea");
}

TEST(DType, OfARecordComesBackFromItsNameAndFromNoOther) {
  for (const DType record : {*record_dtype(24, "x"), DType(1, 0), DType(UINT32_MAX, ~0ull)}) {
    EXPECT_EQ(dtype_from_name(dtype_name(record)), record);
  }
  for (const char* name :
       {"record", "record24", "record24-", "record-0123456789abcdef", "record0-0123456789abcdef",
        "record24-0123456789abcde", "record24-0123456789abcdef0", "record24-0123456789abcdeg",
        "record24-0123456789ABCDEF", "record024-0123456789abcdef", "record+4-0123456789abcdef",
        "record24_0123456789abcdef", "record4294967296-0123456789abcdef"}) {
    EXPECT_FALSE(dtype_from_name(name).has_value()) << name;
  }
}

TEST(View, AddsUpTheBytesOfAllItsTensors) {
  EXPECT_EQ(some_group().nbytes(), 6u * 80);
  EXPECT_EQ((View{{contiguous(DType::kComplex128, {})}, {}}.nbytes()), 16u);
  EXPECT_EQ((View{{contiguous(DType::kComplex128, {5, 0})}, {}}.nbytes()), 0u);
}

}  // namespace
}  // namespace kvzc

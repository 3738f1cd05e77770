#include "kvzc/handle.h"

#include <algorithm>
#include <limits>

#include "base/bytes.h"
#include "base/sha256.h"
#include "unit/unit_support.h"

namespace kvzc {
namespace {

constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kPrefixBytes = 12;
constexpr std::size_t kChecksumBytes = 8;

IndexList list_of(std::vector<std::int64_t> ids) {
  return std::make_shared<const std::vector<std::int64_t>>(std::move(ids));
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

template <std::size_t N>
std::array<std::byte, N> counted_up(unsigned from) {
  std::array<std::byte, N> out;
  for (std::size_t i = 0; i < N; ++i) out[i] = static_cast<std::byte>(from + i);
  return out;
}

HandleInfo info_of(View view) {
  HandleInfo out;
  out.incarnation = counted_up<16>(0x40);
  out.engine_name = "decode-7";
  out.addresses.push_back({AddressKind::kUnix, "kvzc-decode-7-0123456789abcdef0123456789abcdef"});
  out.addresses.push_back({AddressKind::kTcp, "[2001:db8:85a3::8a2e:370:7334]:65535"});
  out.grant_id = 0x123456789abcdef0;
  out.access = Access::kPut;
  out.device_kind = 1;
  out.key = counted_up<32>(0x80);
  for (const TensorView& tensor : view.tensors) {
    while (out.storage_nbytes.size() <= tensor.storage) {
      out.storage_nbytes.push_back(std::uint64_t{3} << 32);
    }
  }
  out.view = std::move(view);
  return out;
}

HandleInfo single() {
  TensorView tensor = contiguous(DType::kBfloat16, {61, 1000, 16, 128});
  tensor.offset = 4096;
  return info_of(View{{tensor}, {}});
}

HandleInfo with_list() {
  TensorView tensor = contiguous(DType::kFloat32, {100, 8, 4});
  tensor.axes[0].list = list_of({99, 0, 5, 6, 7, 7});
  tensor.axes[0].size = 6;
  tensor.axes[2].stride = -4;
  tensor.offset = 12;
  return info_of(View{{tensor}, {}});
}

// 61 layers of K and V, each in a storage of its own.
HandleInfo layers_of_a_model() {
  View view;
  for (std::uint32_t layer = 0; layer < 61; ++layer) {
    for (const char* which : {"k", "v"}) {
      TensorView tensor = contiguous(DType::kBfloat16, {8192, 16, 8, 128});
      tensor.storage = static_cast<std::uint32_t>(view.tensors.size());
      tensor.offset = 256;
      view.tensors.push_back(std::move(tensor));
      view.names.push_back("model.layers." + std::to_string(layer) + ".self_attn." + which +
                           "_cache");
    }
  }
  return info_of(std::move(view));
}

std::vector<std::byte> must_encode(const HandleInfo& info) {
  Result<std::vector<std::byte>> bytes = encode_handle(info);
  EXPECT_TRUE(bytes.is_ok()) << bytes.status().to_string();
  return bytes.is_ok() ? bytes.take() : std::vector<std::byte>();
}

Status decode_status(std::span<const std::byte> bytes) { return decode_handle(bytes).status(); }

// Makes length and checksum fit what the bytes have become, as somebody would who means it.
void seal(std::vector<std::byte>& bytes) {
  const auto length = static_cast<std::uint32_t>(bytes.size());
  for (std::size_t i = 0; i < 4; ++i) bytes[8 + i] = static_cast<std::byte>(length >> (8 * i));
  const Digest checksum = sha256(std::span(bytes).first(bytes.size() - kChecksumBytes));
  std::copy_n(checksum.begin(), kChecksumBytes, bytes.end() - kChecksumBytes);
}

void expect_same(const HandleInfo& a, const HandleInfo& b) {
  EXPECT_EQ(a.incarnation, b.incarnation);
  EXPECT_EQ(a.engine_name, b.engine_name);
  ASSERT_EQ(a.addresses.size(), b.addresses.size());
  for (std::size_t i = 0; i < a.addresses.size(); ++i) {
    EXPECT_EQ(a.addresses[i].kind, b.addresses[i].kind);
    EXPECT_EQ(a.addresses[i].text, b.addresses[i].text);
  }
  EXPECT_EQ(a.grant_id, b.grant_id);
  EXPECT_EQ(a.access, b.access);
  EXPECT_EQ(a.device_kind, b.device_kind);
  EXPECT_EQ(a.key, b.key);
  EXPECT_EQ(a.storage_nbytes, b.storage_nbytes);
  EXPECT_EQ(a.view.names, b.view.names);
  ASSERT_EQ(a.view.tensors.size(), b.view.tensors.size());
  for (std::size_t i = 0; i < a.view.tensors.size(); ++i) {
    const TensorView& x = a.view.tensors[i];
    const TensorView& y = b.view.tensors[i];
    EXPECT_EQ(x.dtype, y.dtype);
    EXPECT_EQ(x.storage, y.storage);
    EXPECT_EQ(x.offset, y.offset);
    ASSERT_EQ(x.axes.size(), y.axes.size());
    for (std::size_t axis = 0; axis < x.axes.size(); ++axis) {
      EXPECT_EQ(x.axes[axis].size, y.axes[axis].size);
      EXPECT_EQ(x.axes[axis].stride, y.axes[axis].stride);
      ASSERT_EQ(x.axes[axis].list == nullptr, y.axes[axis].list == nullptr);
      if (x.axes[axis].list) {
        EXPECT_EQ(*x.axes[axis].list, *y.axes[axis].list);
      }
    }
  }
}

// Sizes of views are signed.
TEST(Handle, RefusesAStorageThatNoViewCouldCover) {
  HandleInfo info = single();
  info.storage_nbytes = {static_cast<std::uint64_t>(kMost) + 1};
  const Result<HandleInfo> back = decode_handle(must_encode(info));
  ASSERT_FALSE(back.is_ok());
  EXPECT_EQ(back.status().code(), Code::kBadHandle);
}

TEST(Handle, ComesBackAsItWas) {
  HandleInfo empty = info_of(View{{contiguous(DType::kUint8, {4, 0})}, {}});
  HandleInfo scalar = info_of(View{{contiguous(DType::kComplex128, {})}, {}});
  HandleInfo bare = single();
  bare.engine_name.clear();
  bare.addresses.clear();
  HandleInfo deep =
      info_of(View{{contiguous(DType::kUint8, std::vector<std::int64_t>(32, 1))}, {}});
  HandleInfo edge = info_of(View{{contiguous(DType::kUint8, {1})}, {}});
  edge.grant_id = std::numeric_limits<std::uint64_t>::max();
  edge.storage_nbytes = {static_cast<std::uint64_t>(kMost)};
  edge.view.tensors[0].offset = kMost - 1;
  HandleInfo one_in_a_group = info_of(View{{contiguous(DType::kUint8, {1})}, {"only"}});
  HandleInfo odd_names =
      info_of(View{{contiguous(DType::kUint8, {1}), contiguous(DType::kUint8, {1}),
                    contiguous(DType::kInt8, {1}), contiguous(DType::kInt8, {2})},
                   {"", std::string(255, 'x'), "x", std::string("a\0b\xc3\xbf", 5)}});
  for (const HandleInfo& info : {single(), with_list(), layers_of_a_model(), empty, scalar, bare,
                                 deep, edge, one_in_a_group, odd_names}) {
    const std::vector<std::byte> bytes = must_encode(info);
    Result<HandleInfo> back = decode_handle(bytes);
    ASSERT_TRUE(back.is_ok()) << back.status().to_string();
    expect_same(info, *back);
    EXPECT_EQ(must_encode(*back), bytes);
  }
}

TEST(Handle, HasNamesInUtf8Only) {
  for (const char* name : {"\xff", "a\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf5\x80\x80\x80"}) {
    const HandleInfo info = info_of(View{{contiguous(DType::kUint8, {1})}, {name}});
    EXPECT_EQ(encode_handle(info).status().code(), Code::kInvalidArgument) << name;
  }
}

TEST(Handle, ComesBackForEveryDTypeAndAccess) {
  std::vector<DType> dtypes = {*record_dtype(24, "some"), DType(1, 0), DType(1u << 31, ~0ull)};
  for (int number = 0; number <= DType::kFloat4E2m1fnX2; ++number) {
    dtypes.push_back(*dtype_from_wire(static_cast<std::uint8_t>(number)));
  }
  for (const DType dtype : dtypes) {
    for (const Access access : {Access::kPut, Access::kGet, Access::kBoth}) {
      HandleInfo info = info_of(View{{contiguous(dtype, {1})}, {}});
      info.access = access;
      Result<HandleInfo> back = decode_handle(must_encode(info));
      ASSERT_TRUE(back.is_ok()) << back.status().to_string();
      expect_same(info, *back);
    }
  }
}

TEST(Handle, IsOneKibibyteAnd64BytesPerTensorAtMost) {
  const HandleInfo model = layers_of_a_model();
  ASSERT_EQ(model.view.tensors.size(), 122u);
  EXPECT_LE(must_encode(model).size(), 1024 + 64 * model.view.tensors.size());
  EXPECT_LE(must_encode(single()).size(), 1024u + 64);
  // Also where no two tensors have a layout in common and all lie in one storage.
  HandleInfo different = model;
  different.storage_nbytes = {std::uint64_t{1} << 40};
  for (std::size_t i = 0; i < different.view.tensors.size(); ++i) {
    TensorView& tensor = different.view.tensors[i];
    tensor = contiguous(DType::kBfloat16, {8192 + static_cast<std::int64_t>(i), 16, 8, 128});
    tensor.offset = static_cast<std::int64_t>(i) << 32;
  }
  EXPECT_LE(must_encode(different).size(), 1024 + 64 * different.view.tensors.size());
}

TEST(Handle, WritesAListOfBlocksOnceForAllTensorsOfAGroup) {
  HandleInfo info = layers_of_a_model();
  std::vector<std::int64_t> blocks;
  for (std::int64_t i = 0; i < 1000; ++i) blocks.push_back((i * 7919) % 8192);
  const std::vector<Index> indices = {Ellipsis{}, list_of(blocks), Slice{}, Slice{}, Slice{}};
  Result<View> part = index_view(info.view, indices);
  ASSERT_TRUE(part.is_ok()) << part.status().to_string();
  info.view = part.take();
  // The numbers of blocks take three bytes at most.
  EXPECT_LE(must_encode(info).size(), 1024 + 64 * info.view.tensors.size() + 3 * blocks.size());
  Result<HandleInfo> back = decode_handle(must_encode(info));
  ASSERT_TRUE(back.is_ok()) << back.status().to_string();
  expect_same(info, *back);
}

TEST(Handle, RefusesWhatDoesNotFitTheFormat) {
  HandleInfo name = layers_of_a_model();
  name.view.names[5] = std::string(256, 'n');
  EXPECT_EQ(encode_handle(name).status().code(), Code::kInvalidArgument);
  const HandleInfo axes =
      info_of(View{{contiguous(DType::kUint8, std::vector<std::int64_t>(33, 1))}, {}});
  EXPECT_EQ(encode_handle(axes).status().code(), Code::kInvalidArgument);
}

TEST(Handle, RefusesEveryTruncation) {
  for (const HandleInfo& info : {single(), with_list(), layers_of_a_model()}) {
    const std::vector<std::byte> bytes = must_encode(info);
    const std::span<const std::byte> all(bytes);
    for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
      // A copy of its own size, so that ASan sees a read beyond it.
      const std::vector<std::byte> part(all.begin(),
                                        all.begin() + static_cast<std::ptrdiff_t>(cut));
      ASSERT_EQ(decode_status(part).code(), Code::kBadHandle) << "cut at " << cut;
    }
  }
}

TEST(Handle, RefusesEveryTruncationWhoseChecksumIsRight) {
  for (const HandleInfo& info : {single(), with_list(), layers_of_a_model()}) {
    const std::vector<std::byte> bytes = must_encode(info);
    for (std::size_t cut = kPrefixBytes; cut < bytes.size() - kChecksumBytes; ++cut) {
      std::vector<std::byte> part(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(cut));
      part.resize(cut + kChecksumBytes);
      seal(part);
      ASSERT_EQ(decode_status(part).code(), Code::kBadHandle) << "cut at " << cut;
    }
  }
}

TEST(Handle, RefusesEveryFlippedBit) {
  for (const HandleInfo& info : {single(), with_list(), layers_of_a_model()}) {
    std::vector<std::byte> bytes = must_encode(info);
    // Of the large one a sample: each look costs a checksum.
    const std::size_t step = bytes.size() > 1000 ? 7 : 1;
    for (std::size_t bit = 0; bit < bytes.size() * 8; bit += step) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      ASSERT_EQ(decode_status(bytes).code(), Code::kBadHandle) << "bit " << bit;
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    ASSERT_TRUE(decode_status(bytes).is_ok());
  }
}

TEST(Handle, RefusesWhatFollowsIt) {
  std::vector<std::byte> bytes = must_encode(single());
  bytes.push_back(std::byte{0});
  EXPECT_EQ(decode_status(bytes).code(), Code::kBadHandle);
  // Also where it is counted in.
  std::vector<std::byte> sealed = must_encode(single());
  sealed.insert(sealed.end() - kChecksumBytes, std::byte{0});
  seal(sealed);
  EXPECT_EQ(decode_status(sealed).code(), Code::kBadHandle);
  std::vector<std::byte> twice = must_encode(single());
  const std::vector<std::byte> once = twice;
  twice.insert(twice.end(), once.begin(), once.end());
  EXPECT_EQ(decode_status(twice).code(), Code::kBadHandle);
}

TEST(Handle, RefusesALengthThatIsNotItsOwn) {
  for (const int wrong_by : {-9, -1, 1, 256}) {
    std::vector<std::byte> bytes = must_encode(single());
    const auto length = static_cast<std::uint32_t>(static_cast<int>(bytes.size()) + wrong_by);
    for (std::size_t i = 0; i < 4; ++i) bytes[8 + i] = static_cast<std::byte>(length >> (8 * i));
    const Digest checksum = sha256(std::span(bytes).first(bytes.size() - kChecksumBytes));
    std::copy_n(checksum.begin(), kChecksumBytes, bytes.end() - kChecksumBytes);
    EXPECT_EQ(decode_status(bytes).code(), Code::kBadHandle) << wrong_by;
  }
}

TEST(Handle, SaysThatItIsOfALaterVersion) {
  for (const unsigned version : {2u, 3u, 255u}) {
    std::vector<std::byte> bytes = must_encode(single());
    bytes[4] = static_cast<std::byte>(version);
    seal(bytes);
    const Status status = decode_status(bytes);
    EXPECT_EQ(status.code(), Code::kBadHandle);
    EXPECT_NE(status.text().find("version " + std::to_string(version)), std::string_view::npos)
        << status.text();
    EXPECT_NE(status.text().find("same kvzc"), std::string_view::npos) << status.text();
    // A later version may keep its length and checksum elsewhere.
    bytes.resize(bytes.size() + 100);
    EXPECT_NE(decode_status(bytes).text().find("version " + std::to_string(version)),
              std::string_view::npos);
  }
}

TEST(Handle, RefusesAKindOrFlagsThatItDoesNotKnow) {
  for (const std::size_t at : {std::size_t{5}, std::size_t{6}, std::size_t{7}}) {
    std::vector<std::byte> bytes = must_encode(single());
    bytes[at] = std::byte{1};
    seal(bytes);
    EXPECT_EQ(decode_status(bytes).code(), Code::kBadHandle) << "byte " << at;
  }
}

TEST(Handle, RefusesAnythingElse) {
  EXPECT_EQ(decode_status({}).code(), Code::kBadHandle);
  for (std::size_t nbytes = 0; nbytes < 100; ++nbytes) {
    EXPECT_EQ(decode_status(std::vector<std::byte>(nbytes)).code(), Code::kBadHandle);
  }
}

// --- Bytes with a right checksum that no kvzc would write ---

struct Forged {
  std::vector<std::uint64_t> storages = {1000};
  DType dtype = DType::kUint8;
  struct ForgedAxis {
    std::uint8_t kind = 0;
    std::uint64_t size = 1;
    std::int64_t stride = 1;
    std::vector<std::int64_t> differences;
  };
  std::vector<ForgedAxis> axes;
  std::uint64_t layout = 0;
  std::uint64_t storage = 0;
  std::uint64_t offset = 0;
  std::uint8_t access = 3;
  std::uint8_t dtype_number = 0;
  std::uint64_t record_nbytes = 1;  // Of dtype number 255.
  std::uint64_t tensors = 1;
};

std::vector<std::byte> forge(const Forged& what) {
  ByteWriter out;
  out.raw(test::as_bytes("KVZH"));
  out.u8(1);
  out.u8(0);
  out.u16(0);
  out.u32(0);
  out.raw(counted_up<16>(0));
  out.u64(5);
  out.u8(what.access);
  out.u8(0);
  out.raw(counted_up<32>(0));
  out.text("name");
  out.varint(0);
  out.varint(what.storages.size());
  for (const std::uint64_t nbytes : what.storages) out.varint(nbytes);
  out.varint(1);
  out.u8(what.dtype_number);
  if (what.dtype_number == DType::kRecord) {
    out.varint(what.record_nbytes);
    out.u64(77);
  }
  out.u8(static_cast<std::uint8_t>(what.axes.size()));
  for (const Forged::ForgedAxis& axis : what.axes) {
    out.u8(axis.kind);
    out.varint(axis.size);
    out.signed_varint(axis.stride);
    for (const std::int64_t difference : axis.differences) out.signed_varint(difference);
  }
  out.u8(0);
  out.varint(what.tensors);
  for (std::uint64_t i = 0; i < what.tensors; ++i) {
    out.varint(what.layout);
    out.varint(what.storage);
    out.varint(what.offset);
  }
  out.raw(std::vector<std::byte>(kChecksumBytes));
  std::vector<std::byte> bytes = out.take();
  seal(bytes);
  return bytes;
}

TEST(ForgedHandle, IsTakenWhenAllOfItFits) {
  Forged forged;
  forged.axes = {{0, 10, 100, {}}, {0, 100, 1, {}}};
  Result<HandleInfo> info = decode_handle(forge(forged));
  ASSERT_TRUE(info.is_ok()) << info.status().to_string();
  EXPECT_EQ(info->view.tensors[0].describe(), "uint8[10, 100]");
  forged.axes = {{1, 3, 100, {9, -9, 4}}};
  info = decode_handle(forge(forged));
  ASSERT_TRUE(info.is_ok()) << info.status().to_string();
  EXPECT_EQ(*info->view.tensors[0].axes[0].list, (std::vector<std::int64_t>{9, 0, 4}));
}

TEST(ForgedHandle, IsRefusedWhenATensorReachesBeyondItsStorage) {
  std::vector<Forged> forgeries;
  const auto with_axes = [&](std::uint64_t offset, std::vector<Forged::ForgedAxis> axes) {
    Forged forged;
    forged.offset = offset;
    forged.axes = std::move(axes);
    forgeries.push_back(forged);
  };
  constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
  with_axes(1000, {});
  with_axes(1001, {{0, 0, 1, {}}});
  with_axes(1, {{0, 1000, 1, {}}});
  with_axes(0, {{0, 1001, 1, {}}});
  with_axes(0, {{0, 2, -1, {}}});
  with_axes(998, {{0, 1000, -1, {}}});
  with_axes(static_cast<std::uint64_t>(kMost), {});
  with_axes(static_cast<std::uint64_t>(kMost) + 1, {});
  with_axes(kAll, {});
  with_axes(0, {{0, kAll, 0, {}}});
  with_axes(0, {{0, std::uint64_t{1} << 63, 0, {}}});
  with_axes(0, {{0, std::uint64_t{1} << 32, 0, {}}, {0, std::uint64_t{1} << 32, 0, {}}});
  with_axes(0, {{0, 2, kMost, {}}, {0, 2, kMost, {}}});
  with_axes(0, {{0, 3, kLeast, {}}});
  with_axes(0, {{0, std::uint64_t{1} << 62, 4, {}}});
  with_axes(0, {{1, 2, 100, {0, 10}}});
  with_axes(0, {{1, 2, 100, {0, -1}}});
  with_axes(0, {{1, 3, 1, {kMost, kMost, 0}}});
  with_axes(0, {{1, 1, kLeast, {kLeast}}});
  for (const Forged& forged : forgeries) {
    EXPECT_EQ(decode_status(forge(forged)).code(), Code::kBadHandle)
        << "forgery " << &forged - forgeries.data();
  }
}

TEST(ForgedHandle, IsRefusedWhenANameContinuesMoreThanThereIs) {
  const HandleInfo info = info_of(
      View{{contiguous(DType::kUint8, {1}), contiguous(DType::kUint8, {1})}, {"abc", "abcd"}});
  std::vector<std::byte> bytes = must_encode(info);
  // The last name: three bytes of the one before, and one more.
  const std::size_t shared_at = bytes.size() - kChecksumBytes - 3;
  ASSERT_EQ(bytes[shared_at], std::byte{3});
  for (const unsigned shared : {4u, 5u, 127u}) {
    bytes[shared_at] = static_cast<std::byte>(shared);
    seal(bytes);
    EXPECT_EQ(decode_status(bytes).code(), Code::kBadHandle) << shared;
  }
  bytes[shared_at] = std::byte{2};
  seal(bytes);
  Result<HandleInfo> back = decode_handle(bytes);
  ASSERT_TRUE(back.is_ok());
  EXPECT_EQ(back->view.names[1], "abd");
}

TEST(ForgedHandle, IsRefusedWhenItsPartsDoNotExist) {
  Forged layout;
  layout.layout = 1;
  EXPECT_EQ(decode_status(forge(layout)).code(), Code::kBadHandle);
  Forged storage;
  storage.storage = 1;
  EXPECT_EQ(decode_status(forge(storage)).code(), Code::kBadHandle);
  storage.storage = std::uint64_t{1} << 32;
  EXPECT_EQ(decode_status(forge(storage)).code(), Code::kBadHandle);
  Forged no_storage;
  no_storage.storages.clear();
  EXPECT_EQ(decode_status(forge(no_storage)).code(), Code::kBadHandle);
  Forged none;
  none.tensors = 0;
  EXPECT_EQ(decode_status(forge(none)).code(), Code::kBadHandle);
  Forged two;
  two.tensors = 2;
  EXPECT_EQ(decode_status(forge(two)).code(), Code::kBadHandle);
  for (const unsigned access : {0u, 4u, 255u}) {
    Forged forged;
    forged.access = static_cast<std::uint8_t>(access);
    EXPECT_EQ(decode_status(forge(forged)).code(), Code::kBadHandle) << access;
  }
  Forged dtype;
  for (const unsigned number : {DType::kFloat4E2m1fnX2 + 1u, 254u}) {
    dtype.dtype_number = static_cast<std::uint8_t>(number);
    EXPECT_EQ(decode_status(forge(dtype)).code(), Code::kBadHandle) << number;
  }
  dtype.dtype_number = DType::kRecord;
  dtype.record_nbytes = 1000;
  EXPECT_EQ(decode_status(forge(dtype)).code(), Code::kOk);
  for (const std::uint64_t nbytes :
       {std::uint64_t{0}, std::uint64_t{1001}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
    dtype.record_nbytes = nbytes;
    EXPECT_EQ(decode_status(forge(dtype)).code(), Code::kBadHandle) << nbytes;
  }
  Forged kind;
  kind.axes = {{2, 1, 1, {}}};
  EXPECT_EQ(decode_status(forge(kind)).code(), Code::kBadHandle);
  Forged short_list;
  short_list.axes = {{1, 1000, 0, {0, 0}}};
  EXPECT_EQ(decode_status(forge(short_list)).code(), Code::kBadHandle);
  short_list.axes = {{1, std::uint64_t{1} << 60, 0, {0, 0}}};
  EXPECT_EQ(decode_status(forge(short_list)).code(), Code::kBadHandle);
  Forged deep;
  deep.axes.assign(33, {0, 1, 1, {}});
  EXPECT_EQ(decode_status(forge(deep)).code(), Code::kBadHandle);
}

// What a handle that was taken must bear: all that its holder does to it without asking the owner.
void use(const HandleInfo& info) {
  for (std::size_t i = 0; i < info.view.tensors.size(); ++i) {
    const TensorView& tensor = info.view.tensors[i];
    ASSERT_LT(tensor.storage, info.storage_nbytes.size());
    ASSERT_TRUE(check_within(tensor, info.storage_nbytes[tensor.storage]).is_ok());
    for (const Axis& axis : tensor.axes) {
      if (axis.list) {
        ASSERT_EQ(static_cast<std::int64_t>(axis.list->size()), axis.size);
      }
    }
    std::vector<Index> indices;
    if (info.view.is_group()) indices.emplace_back(NameList{info.view.names[i]});
    for (std::size_t axis = 0; axis < tensor.axes.size(); ++axis) {
      if (axis % 2 == 0) {
        indices.emplace_back(Slice{-1, std::nullopt, -2});
      } else {
        indices.emplace_back(std::int64_t{-1});
      }
    }
    const Result<View> indexed = index_view(info.view, indices);
    if (indexed.is_ok()) {
      EXPECT_FALSE(indexed->tensors[0].describe().empty());
    }
    for (const DType dtype : {DType(DType::kUint8), DType(DType::kComplex128), DType(3, 0)}) {
      const Result<View> other = view_as(View{{tensor}, {}}, dtype);
      if (!other.is_ok()) continue;
      ASSERT_EQ(other->nbytes(), tensor.nbytes());
      ASSERT_TRUE(check_within(other->tensors[0], info.storage_nbytes[tensor.storage]).is_ok());
    }
    // More would only be slow: these two look at each element when it must be.
    if (tensor.numel() > 4096 || tensor.nbytes() > (1 << 20)) continue;
    (void)check_no_overlap(tensor).is_ok();
    const TensorView local = contiguous(tensor.dtype, tensor.shape());
    std::vector<std::byte> memory(local.nbytes() + 1);
    std::vector<Run> runs;
    cut_runs(local, memory.data(), tensor, runs);
    std::uint64_t total = 0;
    for (const Run& run : runs) {
      ASSERT_LE(run.remote, info.storage_nbytes[tensor.storage]);
      ASSERT_LE(run.nbytes, info.storage_nbytes[tensor.storage] - run.remote);
      total += run.nbytes;
    }
    ASSERT_EQ(total, tensor.nbytes());
  }
  ASSERT_TRUE(encode_handle(info).is_ok());
}

TEST(ForgedHandle, CanBeUsedWhenItWasTakenWhateverItsNumbers) {
  test::Random random(60);
  KVZC_TRACE_SEED(random);
  const std::vector<std::int64_t> strides = {0,
                                             1,
                                             -1,
                                             8,
                                             -8,
                                             100,
                                             1 << 20,
                                             std::int64_t{1} << 61,
                                             std::int64_t{1} << 62,
                                             kMost,
                                             kLeast,
                                             kMost / 2,
                                             -kMost};
  const std::vector<std::int64_t> jumps = {0, 1, 1, 2, -1, 3, kMost, kLeast, kMost / 2, kLeast / 2};
  const std::vector<std::uint64_t> storages = {
      0, 1, 1000, std::uint64_t{1} << 40, std::uint64_t{1} << 63, ~std::uint64_t{0}};
  int taken = 0;
  for (int round = 0; round < 40'000; ++round) {
    Forged forged;
    forged.storages = {random.pick(storages)};
    forged.dtype_number = static_cast<std::uint8_t>(random.between(0, 14));
    if (random.one_in(5)) {
      forged.dtype_number = DType::kRecord;
      forged.record_nbytes = static_cast<std::uint64_t>(
          random.one_in(3) ? random.between(0, std::int64_t{1} << 33) : random.between(0, 40));
    }
    for (std::int64_t axes = random.between(0, 3); axes > 0; --axes) {
      Forged::ForgedAxis axis;
      axis.size = static_cast<std::uint64_t>(random.between(0, 3));
      axis.stride = random.pick(strides);
      if (random.one_in(3)) {
        axis.kind = 1;
        for (std::uint64_t i = 0; i < axis.size; ++i)
          axis.differences.push_back(random.pick(jumps));
      }
      forged.axes.push_back(std::move(axis));
    }
    forged.offset = random.one_in(2) ? 0 : random.pick(storages) / 2;
    Result<HandleInfo> info = decode_handle(forge(forged));
    if (!info.is_ok()) continue;
    ++taken;
    use(*info);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(taken, 2000);
}

TEST(ForgedHandle, NeverCrashesAfterRandomDamage) {
  test::Random random(20'000);
  KVZC_TRACE_SEED(random);
  const std::vector<std::vector<std::byte>> originals = {
      must_encode(single()), must_encode(with_list()), must_encode(layers_of_a_model())};
  int taken = 0;
  for (int round = 0; round < 20'000; ++round) {
    // The large one more rarely, for it takes longer.
    std::vector<std::byte> bytes = originals[random.one_in(10) ? 2 : (random.one_in(2) ? 1 : 0)];
    const auto last = static_cast<std::int64_t>(bytes.size() - kChecksumBytes) - 1;
    for (std::int64_t damages = random.between(1, 4); damages > 0; --damages) {
      // The identity takes up most of a small handle and any bytes will do for it: mostly beyond.
      const std::int64_t first = random.one_in(8) ? kPrefixBytes : 70;
      const auto at = bytes.begin() + std::min(random.between(first, last),
                                               static_cast<std::int64_t>(bytes.size()) - 9);
      switch (random.between(0, 6)) {
        case 0:
          *at = random.byte();
          break;
        case 1:
          *at = random.one_in(2) ? std::byte{0xff} : std::byte{0x7f};
          break;
        case 2:
          *at ^= std::byte{1} << random.between(0, 7);
          break;
        case 3:
          *at = static_cast<std::byte>(std::to_integer<unsigned>(*at) + 1);
          break;
        case 4:
          bytes.erase(at);
          break;
        case 5: {
          const std::vector<std::byte> more =
              random.one_in(2) ? random.bytes(static_cast<std::size_t>(random.between(1, 10)))
                               : test::from_hex("ffffffffffffffff7f");
          bytes.insert(at, more.begin(), more.end());
          break;
        }
        default:
          if (random.one_in(4)) {
            bytes.resize(static_cast<std::size_t>(at - bytes.begin()) + kChecksumBytes);
          }
          break;
      }
      if (bytes.size() < 100) break;
    }
    seal(bytes);
    Result<HandleInfo> info = decode_handle(bytes);
    if (!info.is_ok()) {
      ASSERT_EQ(info.status().code(), Code::kBadHandle);
      continue;
    }
    ++taken;
    use(*info);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(taken, 1000);
}

// --- Text ---

TEST(HandleText, ComesBackForEveryLength) {
  test::Random random(64);
  KVZC_TRACE_SEED(random);
  for (std::size_t nbytes = 0; nbytes <= 300; ++nbytes) {
    const std::vector<std::byte> bytes = random.bytes(nbytes);
    const std::string text = handle_to_text(bytes);
    EXPECT_EQ(text.size(), 6 + (nbytes * 4 + 2) / 3);
    Result<std::vector<std::byte>> back = handle_from_text(text);
    ASSERT_TRUE(back.is_ok()) << back.status().to_string();
    EXPECT_EQ(*back, bytes);
  }
}

TEST(HandleText, IsBase64ForUrls) {
  EXPECT_EQ(handle_to_text(test::as_bytes("")), "kvzc1.");
  EXPECT_EQ(handle_to_text(test::as_bytes("f")), "kvzc1.Zg");
  EXPECT_EQ(handle_to_text(test::as_bytes("fo")), "kvzc1.Zm8");
  EXPECT_EQ(handle_to_text(test::as_bytes("foo")), "kvzc1.Zm9v");
  EXPECT_EQ(handle_to_text(test::from_hex("fbffbf")), "kvzc1.-_-_");
  for (const char c : handle_to_text(must_encode(layers_of_a_model()))) {
    EXPECT_TRUE(std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' ||
                c == '.');
  }
}

TEST(HandleText, GivesAViewToSlice) {
  const HandleInfo info = layers_of_a_model();
  const Result<RemoteView> view = RemoteView::from_text(handle_to_text(must_encode(info)));
  ASSERT_TRUE(view.is_ok()) << view.status().to_string();
  expect_same(info, view->handle->info);
  const std::vector<Index> indices = {std::string("model.layers.60.self_attn.v_cache"),
                                      list_of({5, 1})};
  const Result<RemoteView> part = view->index(indices);
  ASSERT_TRUE(part.is_ok()) << part.status().to_string();
  EXPECT_EQ(part->view.tensors[0].describe(), "bfloat16[2, 16, 8, 128]");
  EXPECT_EQ(part->view.tensors[0].storage, 121u);
  EXPECT_EQ(part->handle, view->handle);
}

TEST(HandleText, RefusesDamage) {
  const std::string text = handle_to_text(must_encode(single()));
  const auto code = [](std::string_view damaged) {
    return RemoteView::from_text(damaged).status().code();
  };
  ASSERT_EQ(code(text), Code::kOk);
  for (std::size_t cut = 0; cut < text.size(); ++cut) {
    ASSERT_EQ(code(std::string_view(text).substr(0, cut)), Code::kBadHandle) << "cut at " << cut;
    if (cut > 0) {
      ASSERT_EQ(code(std::string_view(text).substr(cut)), Code::kBadHandle);
    }
  }
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (const char c : {'A', 'B', '_', '=', '+', '/', ' ', '\n', '\0', '\xff'}) {
      if (text[at] == c) continue;
      std::string damaged = text;
      damaged[at] = c;
      ASSERT_EQ(code(damaged), Code::kBadHandle) << "character " << at;
    }
    std::string swapped = text;
    if (at + 1 < text.size() && text[at] != text[at + 1]) {
      std::swap(swapped[at], swapped[at + 1]);
      ASSERT_EQ(code(swapped), Code::kBadHandle) << "characters from " << at;
    }
  }
  EXPECT_EQ(code(text + "A"), Code::kBadHandle);
  EXPECT_EQ(code(text + "AAAA"), Code::kBadHandle);
  EXPECT_EQ(code(text + "="), Code::kBadHandle);
  EXPECT_EQ(code(" " + text), Code::kBadHandle);
  EXPECT_EQ(code("kvzc2" + text.substr(5)), Code::kBadHandle);
}

TEST(HandleText, HasOneTextOnlyPerHandle) {
  // The unused bits at the end are zero.
  EXPECT_TRUE(handle_from_text("kvzc1.Zg").is_ok());
  EXPECT_FALSE(handle_from_text("kvzc1.Zh").is_ok());
  EXPECT_TRUE(handle_from_text("kvzc1.Zm8").is_ok());
  EXPECT_FALSE(handle_from_text("kvzc1.Zm9").is_ok());
  EXPECT_FALSE(handle_from_text("kvzc1.Z").is_ok());
  EXPECT_FALSE(handle_from_text("kvzc1.Zm9vZ").is_ok());
}

TEST(IncarnationText, Has32HexadecimalDigits) {
  EXPECT_EQ(incarnation_text(counted_up<16>(0xf8)), "f8f9fafbfcfdfeff0001020304050607");
}

}  // namespace
}  // namespace kvzc

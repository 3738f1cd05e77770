#include "base/bytes.h"

#include <limits>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

using test::as_bytes;
using test::from_hex;
using test::hex;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

std::string varint_hex(std::uint64_t value) {
  ByteWriter out;
  out.varint(value);
  return hex(out.view());
}

std::string signed_hex(std::int64_t value) {
  ByteWriter out;
  out.signed_varint(value);
  return hex(out.view());
}

TEST(ByteWriter, WritesFixedNumbersLittleEndian) {
  ByteWriter out;
  out.u8(0x01);
  out.u16(0x0203);
  out.u32(0x04050607);
  out.u64(0x08090a0b0c0d0e0f);
  EXPECT_EQ(hex(out.view()),
            "01"
            "0302"
            "07060504"
            "0f0e0d0c0b0a0908");
  EXPECT_EQ(out.size(), 15u);
}

TEST(ByteWriter, PatchesANumberInPlace) {
  ByteWriter out;
  out.u8(0xff);
  out.u32(0);
  out.u8(0xff);
  out.patch_u32(1, 0x01020304);
  EXPECT_EQ(hex(out.view()), "ff04030201ff");
}

TEST(ByteWriter, WritesVarintsAsShortAsTheyCanBe) {
  EXPECT_EQ(varint_hex(0), "00");
  EXPECT_EQ(varint_hex(127), "7f");
  EXPECT_EQ(varint_hex(128), "8001");
  EXPECT_EQ(varint_hex(300), "ac02");
  EXPECT_EQ(varint_hex(16383), "ff7f");
  EXPECT_EQ(varint_hex(16384), "808001");
  EXPECT_EQ(varint_hex(std::uint64_t{1} << 63), "80808080808080808001");
  EXPECT_EQ(varint_hex(kMax), "ffffffffffffffffff01");
}

TEST(ByteWriter, WritesSmallNumbersOfEitherSignShort) {
  EXPECT_EQ(signed_hex(0), "00");
  EXPECT_EQ(signed_hex(-1), "01");
  EXPECT_EQ(signed_hex(1), "02");
  EXPECT_EQ(signed_hex(-64), "7f");
  EXPECT_EQ(signed_hex(64), "8001");
  EXPECT_EQ(signed_hex(kMost), "feffffffffffffffff01");
  EXPECT_EQ(signed_hex(kLeast), "ffffffffffffffffff01");
}

TEST(ByteReader, ReadsBackEveryPowerOfTwoAndItsNeighbours) {
  for (int shift = 0; shift < 64; ++shift) {
    for (const std::int64_t near : {-1, 0, 1}) {
      const std::uint64_t value = (std::uint64_t{1} << shift) + static_cast<std::uint64_t>(near);
      ByteWriter out;
      out.varint(value);
      out.signed_varint(static_cast<std::int64_t>(value));
      out.u64(value);
      ByteReader in(out.view());
      EXPECT_EQ(in.varint(), value);
      EXPECT_EQ(in.signed_varint(), static_cast<std::int64_t>(value));
      EXPECT_EQ(in.u64(), value);
      EXPECT_TRUE(in.is_good());
      EXPECT_TRUE(in.is_at_end());
    }
  }
}

TEST(ByteReader, ReadsBackRandomSignedNumbers) {
  test::Random random(7);
  KVZC_TRACE_SEED(random);
  for (int i = 0; i < 10'000; ++i) {
    const auto value = static_cast<std::int64_t>(random.engine() >> random.between(0, 63)) *
                       (random.one_in(2) ? -1 : 1);
    ByteWriter out;
    out.signed_varint(value);
    ByteReader in(out.view());
    ASSERT_EQ(in.signed_varint(), value);
    ASSERT_TRUE(in.is_good() && in.is_at_end());
  }
}

TEST(ByteReader, RefusesAVarintOfMoreThan64Bits) {
  for (const char* text :
       {"ffffffffffffffffff02", "80808080808080808002", "ffffffffffffffffff7f",
        "8080808080808080808001", "ffffffffffffffffffff01", "808080808080808080808080808080"}) {
    const std::vector<std::byte> bytes = from_hex(text);
    ByteReader in(bytes);
    EXPECT_EQ(in.varint(), 0u) << text;
    EXPECT_FALSE(in.is_good()) << text;
  }
}

TEST(ByteReader, GivesZeroForAVarintThatEndsTooEarly) {
  for (const char* text : {"", "80", "ff", "ffff", "ffffffffffffffffff"}) {
    const std::vector<std::byte> bytes = from_hex(text);
    ByteReader in(bytes);
    EXPECT_EQ(in.varint(), 0u) << text;
    EXPECT_FALSE(in.is_good()) << text;
  }
}

std::vector<std::byte> one_of_each() {
  ByteWriter out;
  out.u8(1);
  out.u16(2);
  out.u32(3);
  out.u64(4);
  out.varint(300);
  out.signed_varint(-300);
  out.text("name");
  out.blob(as_bytes("blob"));
  out.raw(as_bytes("arr!"));
  return out.take();
}

TEST(ByteReader, ReadsBackOneOfEach) {
  const std::vector<std::byte> bytes = one_of_each();
  ByteReader in(bytes);
  EXPECT_EQ(in.u8(), 1u);
  EXPECT_EQ(in.u16(), 2u);
  EXPECT_EQ(in.u32(), 3u);
  EXPECT_EQ(in.u64(), 4u);
  EXPECT_EQ(in.varint(), 300u);
  EXPECT_EQ(in.signed_varint(), -300);
  EXPECT_EQ(in.text(), "name");
  EXPECT_EQ(hex(in.blob()), hex(as_bytes("blob")));
  EXPECT_EQ(in.left(), 4u);
  EXPECT_EQ(hex(in.array<4>()), hex(as_bytes("arr!")));
  EXPECT_TRUE(in.is_good());
  EXPECT_TRUE(in.is_at_end());
}

TEST(ByteReader, TurnsBadAtEveryTruncationAndGivesZerosFromThenOn) {
  const std::vector<std::byte> bytes = one_of_each();
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    const std::span<const std::byte> all(bytes);
    ByteReader in(all.first(cut));
    in.u8(), in.u16(), in.u32(), in.u64(), in.varint(), in.signed_varint();
    in.text(), in.blob(), in.array<4>();
    EXPECT_FALSE(in.is_good()) << "cut at " << cut;
    EXPECT_EQ(in.u8(), 0u);
    EXPECT_EQ(in.u16(), 0u);
    EXPECT_EQ(in.u32(), 0u);
    EXPECT_EQ(in.u64(), 0u);
    EXPECT_EQ(in.varint(), 0u);
    EXPECT_EQ(in.signed_varint(), 0);
    EXPECT_EQ(in.count(), 0u);
    EXPECT_TRUE(in.text().empty());
    EXPECT_TRUE(in.blob().empty());
    EXPECT_TRUE(in.raw(1).empty());
    EXPECT_EQ(in.array<4>(), (std::array<std::byte, 4>{}));
    EXPECT_TRUE(in.is_at_end());
    EXPECT_FALSE(in.is_good());
  }
}

TEST(ByteReader, StaysBadWhenALaterReadWouldFit) {
  const std::vector<std::byte> bytes = from_hex("0102");
  ByteReader in(bytes);
  EXPECT_EQ(in.u32(), 0u);
  EXPECT_EQ(in.u8(), 0u);
  EXPECT_FALSE(in.is_good());
}

TEST(ByteReader, RefusesACountThatCannotFollow) {
  for (const std::uint64_t count : {std::uint64_t{4}, std::uint64_t{1} << 32, kMax}) {
    ByteWriter out;
    out.varint(count);
    out.raw(as_bytes("abc"));
    ByteReader in(out.view());
    EXPECT_EQ(in.count(), 0u) << count;
    EXPECT_FALSE(in.is_good()) << count;
  }
}

TEST(ByteReader, LooksAtTheLeastSizeOfWhatIsCounted) {
  for (std::size_t least = 1; least <= 8; ++least) {
    for (std::uint64_t count = 0; count <= 20; ++count) {
      ByteWriter out;
      out.varint(count);
      out.raw(std::vector<std::byte>(16));
      ByteReader in(out.view());
      const bool can_follow = count * least <= 16;
      EXPECT_EQ(in.count(least), can_follow ? count : 0) << count << " of " << least;
      EXPECT_EQ(in.is_good(), can_follow) << count << " of " << least;
    }
  }
}

TEST(ByteReader, RefusesATextWhoseLengthLies) {
  for (const std::uint64_t length : {std::uint64_t{4}, std::uint64_t{1} << 40, kMax}) {
    ByteWriter out;
    out.varint(length);
    out.raw(as_bytes("abc"));
    ByteReader text(out.view());
    EXPECT_EQ(text.text(), "");
    EXPECT_FALSE(text.is_good());
    ByteReader blob(out.view());
    EXPECT_TRUE(blob.blob().empty());
    EXPECT_FALSE(blob.is_good());
  }
}

TEST(ByteReader, ReadsEmptyTextsFromEmptyInput) {
  ByteWriter out;
  out.text("");
  out.blob({});
  ByteReader in(out.view());
  EXPECT_EQ(in.text(), "");
  EXPECT_TRUE(in.blob().empty());
  EXPECT_TRUE(in.raw(0).empty());
  EXPECT_TRUE(in.is_good());
}

TEST(ByteReader, SurvivesRandomReadsOfRandomBytes) {
  test::Random random(11);
  KVZC_TRACE_SEED(random);
  for (int i = 0; i < 20'000; ++i) {
    const std::vector<std::byte> bytes =
        random.bytes(static_cast<std::size_t>(random.between(0, 40)));
    ByteReader in(bytes);
    bool was_good = true;
    while (!in.is_at_end()) {
      const std::size_t before = in.left();
      switch (random.between(0, 7)) {
        case 0:
          in.u8();
          break;
        case 1:
          in.u16();
          break;
        case 2:
          in.u64();
          break;
        case 3:
          in.varint();
          break;
        case 4:
          in.signed_varint();
          break;
        case 5:
          in.count(static_cast<std::size_t>(random.between(1, 9)));
          break;
        case 6:
          in.text();
          break;
        default:
          in.array<5>();
          break;
      }
      ASSERT_LT(in.left(), before);
      ASSERT_TRUE(was_good || !in.is_good());
      was_good = in.is_good();
    }
  }
}

}  // namespace
}  // namespace kvzc

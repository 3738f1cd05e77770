#include "base/sha256.h"

#include <algorithm>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

using test::as_bytes;
using test::from_hex;
using test::hex;

std::string hash_of(std::string_view text) { return hex(sha256(as_bytes(text))); }

TEST(Sha256, MatchesTheVectorsOfFips180) {
  EXPECT_EQ(hash_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hash_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hash_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                    "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
}

TEST(Sha256, MatchesTheVectorOfAMillionLetters) {
  EXPECT_EQ(hash_of(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The vectors that NIST gives for messages around the padding's edge, made of one repeated byte.
TEST(Sha256, MatchesTheVectorsOfRepeatedBytes) {
  EXPECT_EQ(hash_of(std::string(1, '\xbd')),
            "68325720aabd7c82f30f554b313d0570c95accbb7dc4b5aae11204c08ffe732b");
  EXPECT_EQ(hash_of(std::string(55, '\0')),
            "02779466cdec163811d078815c633f21901413081449002f24aa3e80f0b88ef7");
  EXPECT_EQ(hash_of(std::string(56, '\0')),
            "d4817aa5497628e7c77e6b606107042bbba3130888c5f47a375e6179be789fbb");
  EXPECT_EQ(hash_of(std::string(57, '\0')),
            "65a16cb7861335d5ace3c60718b5052e44660726da4cd13bb745381b235a1785");
  EXPECT_EQ(hash_of(std::string(64, '\0')),
            "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b");
  EXPECT_EQ(hash_of(std::string(1000, '\0')),
            "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53");
  EXPECT_EQ(hash_of(std::string(1000, 'A')),
            "c2e686823489ced2017f6059b8b239318b6364f6dcd835d0a519105a1eadd6e4");
  EXPECT_EQ(hash_of(std::string(1005, 'U')),
            "f4d62ddec0f3dd90ea1380fa16a5ff8dc4c54b21740650f24afc4120903552b0");
}

TEST(Sha256, GivesTheSameForEverySplitIntoTwoAndThreeUpdates) {
  test::Random random(256);
  KVZC_TRACE_SEED(random);
  const std::vector<std::byte> data = random.bytes(200);
  const Digest whole = sha256(data);
  const std::span<const std::byte> all(data);
  for (std::size_t first = 0; first <= data.size(); ++first) {
    Sha256 two;
    two.update(all.first(first));
    two.update(all.subspan(first));
    ASSERT_EQ(two.finish(), whole) << "split at " << first;
    for (std::size_t second = first; second <= data.size(); second += 7) {
      Sha256 three;
      three.update(all.first(first));
      three.update(all.subspan(first, second - first));
      three.update(all.subspan(second));
      ASSERT_EQ(three.finish(), whole) << "split at " << first << " and " << second;
    }
  }
}

TEST(Sha256, GivesTheSameByteByByte) {
  const std::string text(500, 'k');
  Sha256 hash;
  for (const char& c : text) hash.update(std::as_bytes(std::span(&c, 1)));
  EXPECT_EQ(hash.finish(), sha256(as_bytes(text)));
}

TEST(Sha256, ChangesWithEveryBitOfTheMessage) {
  std::vector<std::byte> data(130);
  const Digest before = sha256(data);
  for (std::size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_NE(sha256(data), before) << "bit " << bit;
    data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

struct HmacVector {
  std::vector<std::byte> key;
  std::vector<std::byte> message;
  std::string expected;
};

std::vector<std::byte> repeated(std::size_t count, unsigned value) {
  return std::vector<std::byte>(count, static_cast<std::byte>(value));
}

std::vector<std::byte> letters(std::string_view text) {
  const auto bytes = as_bytes(text);
  return {bytes.begin(), bytes.end()};
}

TEST(HmacSha256, MatchesTheVectorsOfRfc4231) {
  const std::vector<HmacVector> vectors = {
      {repeated(20, 0x0b), letters("Hi There"),
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {letters("Jefe"), letters("what do ya want for nothing?"),
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {repeated(20, 0xaa), repeated(50, 0xdd),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {from_hex("0102030405060708090a0b0c0d0e0f10111213141516171819"), repeated(50, 0xcd),
       "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {repeated(131, 0xaa), letters("Test Using Larger Than Block-Size Key - Hash Key First"),
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {repeated(131, 0xaa),
       letters("This is a test using a larger than block-size key and a larger than block-size "
               "data. The key needs to be hashed before being used by the HMAC algorithm."),
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const HmacVector& vector : vectors) {
    EXPECT_EQ(hex(hmac_sha256(vector.key, vector.message)), vector.expected);
  }
  // The truncated one.
  const Digest truncated = hmac_sha256(repeated(20, 0x0c), letters("Test With Truncation"));
  EXPECT_EQ(hex(std::span(truncated).first(16)), "a3b6167473100ee06e0c796c2955552b");
}

TEST(HmacSha256, TakesAKeyOfExactlyOneBlockAsItIsAndHashesALongerOne) {
  const std::vector<std::byte> message = letters("message");
  const std::vector<std::byte> block = repeated(64, 0x61);
  std::vector<std::byte> longer = repeated(65, 0x61);
  const Digest hashed = sha256(longer);
  EXPECT_EQ(hmac_sha256(longer, message), hmac_sha256(hashed, message));
  EXPECT_NE(hmac_sha256(block, message), hmac_sha256(sha256(block), message));
  // A shorter key is filled up with zeros, so a key with a zero at its end is the same key.
  EXPECT_EQ(hmac_sha256(repeated(63, 0x61), message), [&] {
    std::vector<std::byte> padded = repeated(63, 0x61);
    padded.push_back(std::byte{0});
    return hmac_sha256(padded, message);
  }());
}

TEST(EqualInConstantTime, SeesADifferenceInEveryBit) {
  const Digest a = sha256(as_bytes("a"));
  EXPECT_TRUE(equal_in_constant_time(a, a));
  for (std::size_t bit = 0; bit < a.size() * 8; ++bit) {
    Digest b = a;
    b[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(equal_in_constant_time(a, b)) << "bit " << bit;
    EXPECT_FALSE(equal_in_constant_time(b, a)) << "bit " << bit;
  }
}

TEST(FillRandom, FillsEveryByteAndNeverTheSameTwice) {
  for (const std::size_t nbytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{32}, std::size_t{100'000}}) {
    std::vector<std::byte> first(nbytes);
    std::vector<std::byte> second(nbytes);
    ASSERT_TRUE(fill_random(first).is_ok());
    ASSERT_TRUE(fill_random(second).is_ok());
    if (nbytes < 32) continue;
    EXPECT_NE(first, second);
    // No stretch of 16 zeros: chance has it with a probability of 2^-111.
    const std::vector<std::byte> zeros(16);
    EXPECT_EQ(std::search(first.begin(), first.end(), zeros.begin(), zeros.end()), first.end());
  }
}

}  // namespace
}  // namespace kvzc

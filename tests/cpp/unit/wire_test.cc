#include "core/wire.h"

#include <limits>
#include <set>

#include "base/bytes.h"
#include "unit/unit_support.h"

namespace kvzc::wire {
namespace {

using test::as_bytes;

template <std::size_t N>
std::array<std::byte, N> counted_up(unsigned from) {
  std::array<std::byte, N> out;
  for (std::size_t i = 0; i < N; ++i) out[i] = static_cast<std::byte>(from + i);
  return out;
}

std::vector<std::byte> some_bytes(std::string_view text) {
  const auto bytes = as_bytes(text);
  return {bytes.begin(), bytes.end()};
}

std::vector<Offer> some_offers() {
  return {{"shm", some_bytes("three descriptors"), 3}, {"tcp", {}, 0}, {"", some_bytes("x"), 255}};
}

Hello some_hello() {
  return {
      1,          7, counted_up<16>(1), counted_up<16>(101), counted_up<32>(50), 0x0102030405060708,
      "prefill-3"};
}

// One kind of message: an example, and how to write and read it.
struct Kind {
  const char* name;
  Type type;
  std::vector<std::byte> bytes;
  // Reads a body and gives the message written again, or the refusal.
  std::function<Result<std::vector<std::byte>>(std::span<const std::byte>)> rewrite;
};

template <typename Decode, typename Encode>
auto rewriter(Decode decode, Encode encode_again) {
  return [=](std::span<const std::byte> body) -> Result<std::vector<std::byte>> {
    auto message = decode(body);
    if (!message.is_ok()) return message.status();
    return encode_again(*message);
  };
}

std::vector<Kind> kinds() {
  const auto again = [](const auto& message) { return encode(message); };
  const Attached accepted{
      7, Code::kOk, "", counted_up<32>(3), 11, 0xfedcba9876543210, {1, 2, 1ull << 63}};
  const Attached refused{8, Code::kRevoked, "the grant was revoked", {}, 0, 0, {}};
  const Storage storage{42,
                        1ull << 40,
                        {{"shm", Code::kOk, "", some_bytes("how"), 1},
                         {"rdma", Code::kTransportUnavailable, "no device", {}, 0}}};
  return {
      {"hello", Type::kHello, encode(some_hello()), rewriter(decode_hello, again)},
      {"challenge", Type::kChallenge,
       encode(Challenge{1, counted_up<32>(1), counted_up<32>(60), "decode"}),
       rewriter(decode_challenge, again)},
      {"proof", Type::kProof, encode(Proof{counted_up<32>(9), some_offers()}),
       rewriter(decode_proof, again)},
      {"welcome", Type::kWelcome, encode(Welcome{some_offers()}), rewriter(decode_welcome, again)},
      {"empty welcome", Type::kWelcome, encode(Welcome{}), rewriter(decode_welcome, again)},
      {"refuse", Type::kRefuse, encode(Type::kRefuse, Refuse{Code::kAccessDenied, "another user"}),
       rewriter(decode_refuse, [](const Refuse& m) { return encode(Type::kRefuse, m); })},
      {"bye", Type::kBye, encode(Type::kBye, Refuse{}),
       rewriter(decode_refuse, [](const Refuse& m) { return encode(Type::kBye, m); })},
      {"attach", Type::kAttach, encode(Attach{3, 99, counted_up<32>(200)}),
       rewriter(decode_attach, again)},
      {"storage", Type::kStorage, encode(storage), rewriter(decode_storage, again)},
      {"attached", Type::kAttached, encode(accepted), rewriter(decode_attached, again)},
      {"attached, refused", Type::kAttached, encode(refused), rewriter(decode_attached, again)},
      {"release", Type::kRelease, encode(Release{0x1122334455667788}),
       rewriter(decode_release, again)},
  };
}

TEST(Wire, OpensEachMessageAndReadsItBackWhole) {
  for (const Kind& kind : kinds()) {
    auto opened = open(kind.bytes);
    ASSERT_TRUE(opened.is_ok()) << kind.name << ": " << opened.status().to_string();
    EXPECT_EQ(opened->first, kind.type) << kind.name;
    Result<std::vector<std::byte>> again = kind.rewrite(opened->second);
    ASSERT_TRUE(again.is_ok()) << kind.name << ": " << again.status().to_string();
    EXPECT_EQ(*again, kind.bytes) << kind.name;
  }
}

TEST(Wire, ReadsEveryFieldOfAHello) {
  const std::vector<std::byte> bytes = encode(some_hello());
  Result<Hello> got = decode_hello(open(bytes)->second);
  ASSERT_TRUE(got.is_ok());
  EXPECT_EQ(got->lowest_version, 1);
  EXPECT_EQ(got->highest_version, 7);
  EXPECT_EQ(got->from, counted_up<16>(1));
  EXPECT_EQ(got->to, counted_up<16>(101));
  EXPECT_EQ(got->nonce, counted_up<32>(50));
  EXPECT_EQ(got->grant_id, 0x0102030405060708u);
  EXPECT_EQ(got->engine_name, "prefill-3");
}

TEST(Wire, ReadsEveryFieldOfAChallenge) {
  const std::vector<std::byte> bytes =
      encode(Challenge{513, counted_up<32>(1), counted_up<32>(60), "decode"});
  Result<Challenge> got = decode_challenge(open(bytes)->second);
  ASSERT_TRUE(got.is_ok());
  EXPECT_EQ(got->version, 513);
  EXPECT_EQ(got->nonce, counted_up<32>(1));
  EXPECT_EQ(got->proof, counted_up<32>(60));
  EXPECT_EQ(got->engine_name, "decode");
}

TEST(Wire, ReadsEveryFieldOfAProof) {
  const std::vector<std::byte> bytes = encode(Proof{counted_up<32>(9), some_offers()});
  Result<Proof> got = decode_proof(open(bytes)->second);
  ASSERT_TRUE(got.is_ok());
  EXPECT_EQ(got->proof, counted_up<32>(9));
  ASSERT_EQ(got->offers.size(), 3u);
  EXPECT_EQ(got->offers[0].transport, "shm");
  EXPECT_EQ(got->offers[0].bytes, some_bytes("three descriptors"));
  EXPECT_EQ(got->offers[0].fd_count, 3);
  EXPECT_EQ(got->offers[1].transport, "tcp");
  EXPECT_EQ(got->offers[2].fd_count, 255);
}

TEST(Wire, ReadsEveryFieldOfAStorage) {
  const std::vector<std::byte> bytes =
      encode(Storage{42,
                     1ull << 40,
                     {{"shm", Code::kOk, "", some_bytes("how"), 1},
                      {"rdma", Code::kTransportUnavailable, "no device", {}, 0}}});
  Result<Storage> got = decode_storage(open(bytes)->second);
  ASSERT_TRUE(got.is_ok());
  EXPECT_EQ(got->id, 42u);
  EXPECT_EQ(got->nbytes, 1ull << 40);
  ASSERT_EQ(got->roads.size(), 2u);
  EXPECT_EQ(got->roads[0].transport, "shm");
  EXPECT_EQ(got->roads[0].bytes, some_bytes("how"));
  EXPECT_EQ(got->roads[0].fd_count, 1);
  EXPECT_EQ(got->roads[1].code, Code::kTransportUnavailable);
  EXPECT_EQ(got->roads[1].text, "no device");
}

TEST(Wire, ReadsEveryFieldOfWhatAttachesAndReleases) {
  const std::vector<std::byte> attach_bytes = encode(Attach{3, 99, counted_up<32>(200)});
  Result<Attach> attach = decode_attach(open(attach_bytes)->second);
  ASSERT_TRUE(attach.is_ok());
  EXPECT_EQ(attach->request, 3u);
  EXPECT_EQ(attach->grant_id, 99u);
  EXPECT_EQ(attach->proof, counted_up<32>(200));
  const std::vector<std::byte> attached_bytes =
      encode(Attached{7, Code::kRevoked, "why", counted_up<32>(3), 11, 12, {1, 2}});
  Result<Attached> attached = decode_attached(open(attached_bytes)->second);
  ASSERT_TRUE(attached.is_ok());
  EXPECT_EQ(attached->request, 7u);
  EXPECT_EQ(attached->code, Code::kRevoked);
  EXPECT_EQ(attached->text, "why");
  EXPECT_EQ(attached->proof, counted_up<32>(3));
  EXPECT_EQ(attached->fence_slot, 11u);
  EXPECT_EQ(attached->fence_epoch, 12u);
  EXPECT_EQ(attached->storages, (std::vector<std::uint64_t>{1, 2}));
  const std::vector<std::byte> release_bytes = encode(Release{77});
  EXPECT_EQ(decode_release(open(release_bytes)->second)->storage, 77u);
  const std::vector<std::byte> refuse_bytes = encode(Type::kRefuse, Refuse{Code::kClosed, "late"});
  Result<Refuse> refuse = decode_refuse(open(refuse_bytes)->second);
  ASSERT_TRUE(refuse.is_ok());
  EXPECT_EQ(refuse->code, Code::kClosed);
  EXPECT_EQ(refuse->text, "late");
}

TEST(Wire, OpensAKickWhichHasNoBody) {
  const std::vector<std::byte> bytes = encode_kick();
  auto opened = open(bytes);
  ASSERT_TRUE(opened.is_ok());
  EXPECT_EQ(opened->first, Type::kKick);
  EXPECT_TRUE(opened->second.empty());
}

TEST(Wire, RefusesEveryTruncation) {
  for (const Kind& kind : kinds()) {
    for (std::size_t cut = 0; cut < kind.bytes.size(); ++cut) {
      // Copies of their own size, so that ASan sees a read beyond them.
      const std::vector<std::byte> part(kind.bytes.begin(),
                                        kind.bytes.begin() + static_cast<std::ptrdiff_t>(cut));
      EXPECT_EQ(open(part).status().code(), Code::kProtocol) << kind.name << " cut at " << cut;
      if (cut < 8) continue;
      const std::vector<std::byte> body(part.begin() + 8, part.end());
      EXPECT_EQ(kind.rewrite(body).status().code(), Code::kProtocol)
          << kind.name << " cut at " << cut;
    }
  }
}

TEST(Wire, RefusesWhatFollowsAMessage) {
  for (const Kind& kind : kinds()) {
    std::vector<std::byte> more = kind.bytes;
    more.push_back(std::byte{0});
    EXPECT_EQ(open(more).status().code(), Code::kProtocol) << kind.name;
    more.erase(more.begin(), more.begin() + 8);
    EXPECT_EQ(kind.rewrite(more).status().code(), Code::kProtocol) << kind.name;
  }
}

TEST(Wire, RefusesAHeadThatItDoesNotKnow) {
  const std::vector<std::byte> bytes = encode(Release{1});
  const auto with = [&](std::size_t at, unsigned value) {
    std::vector<std::byte> changed = bytes;
    changed[at] = static_cast<std::byte>(value);
    return open(changed).status().code();
  };
  EXPECT_EQ(with(0, 0), Code::kProtocol);
  EXPECT_EQ(with(0, static_cast<unsigned>(Type::kBye) + 1), Code::kProtocol);
  EXPECT_EQ(with(1, 1), Code::kProtocol);
  EXPECT_EQ(with(2, 1), Code::kProtocol);
  EXPECT_EQ(with(3, 128), Code::kProtocol);
  for (std::size_t at = 4; at < 8; ++at) EXPECT_EQ(with(at, 0xee), Code::kProtocol) << at;
  EXPECT_EQ(open({}).status().code(), Code::kProtocol);
}

TEST(Wire, RefusesAHelloThatIsNotOurs) {
  const std::vector<std::byte> bytes = encode(some_hello());
  for (std::size_t at = 8; at < 12; ++at) {
    std::vector<std::byte> changed = bytes;
    changed[at] ^= std::byte{1};
    auto opened = open(changed);
    ASSERT_TRUE(opened.is_ok());
    EXPECT_EQ(decode_hello(opened->second).status().code(), Code::kProtocol) << at;
  }
}

TEST(Wire, TakesACodeThatItDoesNotKnowForABreachOfProtocol) {
  std::vector<std::byte> bytes = encode(Type::kRefuse, Refuse{Code::kClosed, "x"});
  bytes[8] = std::byte{200};
  Result<Refuse> refuse = decode_refuse(open(bytes)->second);
  ASSERT_TRUE(refuse.is_ok());
  EXPECT_EQ(refuse->code, Code::kProtocol);
}

TEST(Wire, RefusesCountsThatCannotFollow) {
  for (const std::uint64_t count :
       {std::uint64_t{1}, std::uint64_t{1} << 20, std::uint64_t{1} << 40,
        std::numeric_limits<std::uint64_t>::max()}) {
    ByteWriter welcome;
    welcome.varint(count);
    EXPECT_EQ(decode_welcome(welcome.view()).status().code(), Code::kProtocol) << count;
    ByteWriter storage;
    storage.u64(1);
    storage.u64(1);
    storage.varint(count);
    EXPECT_EQ(decode_storage(storage.view()).status().code(), Code::kProtocol) << count;
    std::vector<std::byte> attached = encode(Attached{});
    attached.erase(attached.begin(), attached.begin() + 8);
    attached.pop_back();
    ByteWriter with_count;
    with_count.raw(attached);
    with_count.varint(count);
    with_count.raw(std::vector<std::byte>(7));
    EXPECT_EQ(decode_attached(with_count.view()).status().code(), Code::kProtocol) << count;
  }
}

TEST(Wire, NeverCrashesOnRandomOrDamagedBodies) {
  test::Random random(8);
  KVZC_TRACE_SEED(random);
  const std::vector<Kind> all = kinds();
  int taken = 0;
  for (int round = 0; round < 20'000; ++round) {
    const Kind& kind = random.pick(all);
    std::vector<std::byte> body;
    if (random.one_in(2)) {
      body = random.bytes(static_cast<std::size_t>(random.between(0, 200)));
    } else {
      body.assign(kind.bytes.begin() + 8, kind.bytes.end());
      for (std::int64_t damages = random.between(1, 3); damages > 0 && !body.empty(); --damages) {
        const auto at =
            body.begin() + random.between(0, static_cast<std::int64_t>(body.size()) - 1);
        switch (random.between(0, 3)) {
          case 0:
            *at = random.byte();
            break;
          case 1:
            *at = std::byte{0xff};
            break;
          case 2:
            body.erase(at);
            break;
          default:
            body.insert(at, random.byte());
            break;
        }
      }
    }
    // Whatever the body of one kind, it may be read as another.
    const Kind& read_as = random.one_in(2) ? kind : random.pick(all);
    Result<std::vector<std::byte>> again = read_as.rewrite(body);
    if (again.is_ok()) {
      ++taken;
    } else {
      ASSERT_EQ(again.status().code(), Code::kProtocol);
    }
  }
  EXPECT_GT(taken, 500);
}

// --- Sessions and proofs ---

TEST(WireSession, DiffersByEveryFieldOfTheHelloAndByBothNonces) {
  const Nonce nonce = counted_up<32>(7);
  const Hello hello = some_hello();
  std::set<Digest> sessions = {session(hello, nonce)};
  const auto expect_new = [&](const Digest& digest, const char* what) {
    EXPECT_TRUE(sessions.insert(digest).second) << what;
  };
  EXPECT_EQ(session(hello, nonce), session(some_hello(), counted_up<32>(7)));
  expect_new(session(hello, counted_up<32>(8)), "the owner's nonce");
  Hello other = hello;
  other.nonce[31] ^= std::byte{1};
  expect_new(session(other, nonce), "the asker's nonce");
  other = hello;
  other.from[0] ^= std::byte{1};
  expect_new(session(other, nonce), "the asker's incarnation");
  other = hello;
  other.to[15] ^= std::byte{1};
  expect_new(session(other, nonce), "the owner's incarnation");
  other = hello;
  std::swap(other.from, other.to);
  expect_new(session(other, nonce), "the incarnations' places");
  other = hello;
  other.grant_id ^= 1;
  expect_new(session(other, nonce), "the grant");
  other = hello;
  other.engine_name += "x";
  expect_new(session(other, nonce), "the name");
  other = hello;
  other.lowest_version = 2;
  expect_new(session(other, nonce), "the lowest version");
  other = hello;
  other.highest_version = 8;
  expect_new(session(other, nonce), "the highest version");
  expect_new(session(hello, nonce, "a secret that two hosts share"), "a secret");
  expect_new(session(hello, nonce, "a secret that two hosts sharf"), "the secret");
}

TEST(WireProof, DiffersByKeyRoleSessionAndGrant) {
  const GrantKey key = counted_up<32>(1);
  const Digest here = session(some_hello(), counted_up<32>(7));
  const Digest proof = prove(key, "owner", here, 5);
  EXPECT_EQ(prove(key, "owner", here, 5), proof);
  EXPECT_NE(prove(key, "asker", here, 5), proof);
  EXPECT_NE(prove(key, "", here, 5), proof);
  EXPECT_NE(prove(key, "owner", here, 6), proof);
  EXPECT_NE(prove(key, "owner", here, 5 + (1ull << 32)), proof);
  EXPECT_NE(prove(key, "owner", session(some_hello(), counted_up<32>(8)), 5), proof);
  for (std::size_t bit = 0; bit < key.size() * 8; ++bit) {
    GrantKey other = key;
    other[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(prove(other, "owner", here, 5), proof) << "bit " << bit;
  }
}

TEST(WireProof, IsTheHmacThatIsWrittenDown) {
  const GrantKey key = counted_up<32>(1);
  const Digest here = session(some_hello(), counted_up<32>(7));
  std::vector<std::byte> message = some_bytes("\x05owner");
  message.insert(message.end(), here.begin(), here.end());
  for (const unsigned byte : {8u, 7u, 6u, 5u, 4u, 3u, 2u, 1u}) {
    message.push_back(static_cast<std::byte>(byte));
  }
  EXPECT_EQ(prove(key, "owner", here, 0x0102030405060708), hmac_sha256(key, message));
}

}  // namespace
}  // namespace kvzc::wire

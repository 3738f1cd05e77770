#include "core/wire.h"

#include "base/bytes.h"
#include "base/utf8.h"

namespace kvzc::wire {
namespace {

constexpr std::string_view kMagic = "KVZC";

ByteWriter start(Type type) {
  ByteWriter out;
  out.u16(static_cast<std::uint16_t>(type));
  out.u16(0);  // Flags.
  out.u32(0);  // Length, filled in by finish().
  return out;
}

std::vector<std::byte> finish(ByteWriter& out) {
  out.patch_u32(4, static_cast<std::uint32_t>(out.size()));
  return out.take();
}

void write_offers(ByteWriter& out, const std::vector<Offer>& offers) {
  out.varint(offers.size());
  for (const Offer& offer : offers) {
    out.text(offer.transport);
    out.blob(offer.bytes);
    out.u8(offer.fd_count);
  }
}

std::vector<std::byte> copy(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

// Names and reasons, which end up before people: a page at most, and readable.
constexpr std::size_t kMaxTextBytes = 4096;

std::string read_text(ByteReader& in) {
  std::string text = in.text();
  if (text.size() > kMaxTextBytes || !is_utf8(text)) in.fail();
  return text;
}

std::vector<Offer> read_offers(ByteReader& in) {
  std::vector<Offer> out;
  for (std::size_t left = in.count(3); left > 0; --left) {
    Offer offer;
    offer.transport = read_text(in);
    offer.bytes = copy(in.blob());
    offer.fd_count = in.u8();
    out.push_back(std::move(offer));
  }
  return out;
}

// The last look at a body: all of it must have been read, and nothing beyond.
template <typename T>
Result<T> checked(const ByteReader& in, T message) {
  if (in.is_good() && in.is_at_end()) return message;
  return Status(Code::kProtocol, "the peer sent a damaged control message");
}

}  // namespace

std::vector<std::byte> encode(const Hello& message) {
  ByteWriter out = start(Type::kHello);
  out.raw(std::as_bytes(std::span(kMagic)));
  out.u16(message.lowest_version);
  out.u16(message.highest_version);
  out.raw(message.from);
  out.raw(message.to);
  out.raw(message.nonce);
  out.u64(message.grant_id);
  out.text(message.engine_name);
  return finish(out);
}

std::vector<std::byte> encode(const Challenge& message) {
  ByteWriter out = start(Type::kChallenge);
  out.u16(message.version);
  out.raw(message.nonce);
  out.raw(message.proof);
  out.text(message.engine_name);
  return finish(out);
}

std::vector<std::byte> encode(const Proof& message) {
  ByteWriter out = start(Type::kProof);
  out.raw(message.proof);
  write_offers(out, message.offers);
  return finish(out);
}

std::vector<std::byte> encode(const Welcome& message) {
  ByteWriter out = start(Type::kWelcome);
  write_offers(out, message.offers);
  return finish(out);
}

std::vector<std::byte> encode(Type type, const Refuse& message) {
  ByteWriter out = start(type);
  out.u8(static_cast<std::uint8_t>(message.code));
  out.text(message.text);
  return finish(out);
}

std::vector<std::byte> encode(const Attach& message) {
  ByteWriter out = start(Type::kAttach);
  out.u32(message.request);
  out.u64(message.grant_id);
  out.raw(message.proof);
  return finish(out);
}

std::vector<std::byte> encode(const Storage& message) {
  ByteWriter out = start(Type::kStorage);
  out.u64(message.id);
  out.u64(message.nbytes);
  out.varint(message.roads.size());
  for (const Road& road : message.roads) {
    out.text(road.transport);
    out.u8(static_cast<std::uint8_t>(road.code));
    out.text(road.text);
    out.blob(road.bytes);
    out.u8(road.fd_count);
  }
  return finish(out);
}

std::vector<std::byte> encode(const Attached& message) {
  ByteWriter out = start(Type::kAttached);
  out.u32(message.request);
  out.u8(static_cast<std::uint8_t>(message.code));
  out.text(message.text);
  out.raw(message.proof);
  out.u32(message.fence_slot);
  out.u64(message.fence_epoch);
  out.varint(message.storages.size());
  for (const std::uint64_t id : message.storages) out.u64(id);
  return finish(out);
}

std::vector<std::byte> encode(const Release& message) {
  ByteWriter out = start(Type::kRelease);
  out.u64(message.storage);
  return finish(out);
}

std::vector<std::byte> encode_kick() {
  ByteWriter out = start(Type::kKick);
  return finish(out);
}

std::uint32_t message_bytes(std::span<const std::byte> header) {
  ByteReader in(header.subspan(4));
  return in.u32();
}

Result<std::pair<Type, std::span<const std::byte>>> open(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  const std::uint16_t type = in.u16();
  const std::uint16_t flags = in.u16();
  const std::uint32_t length = in.u32();
  if (!in.is_good() || flags != 0 || length != bytes.size() || type < 1 ||
      type > static_cast<std::uint16_t>(Type::kBye)) {
    return Status(Code::kProtocol, "the peer does not speak kvzc's control protocol");
  }
  return std::pair(static_cast<Type>(type), bytes.subspan(kHeaderBytes));
}

Result<Hello> decode_hello(std::span<const std::byte> body) {
  ByteReader in(body);
  const auto magic = in.array<4>();
  Hello out;
  out.lowest_version = in.u16();
  out.highest_version = in.u16();
  out.from = in.array<16>();
  out.to = in.array<16>();
  out.nonce = in.array<32>();
  out.grant_id = in.u64();
  out.engine_name = read_text(in);
  if (std::memcmp(magic.data(), kMagic.data(), magic.size()) != 0) in.fail();
  return checked(in, std::move(out));
}

Result<Challenge> decode_challenge(std::span<const std::byte> body) {
  ByteReader in(body);
  Challenge out;
  out.version = in.u16();
  out.nonce = in.array<32>();
  out.proof = in.array<32>();
  out.engine_name = read_text(in);
  return checked(in, std::move(out));
}

Result<Proof> decode_proof(std::span<const std::byte> body) {
  ByteReader in(body);
  Proof out;
  out.proof = in.array<32>();
  out.offers = read_offers(in);
  return checked(in, std::move(out));
}

Result<Welcome> decode_welcome(std::span<const std::byte> body) {
  ByteReader in(body);
  Welcome out;
  out.offers = read_offers(in);
  return checked(in, std::move(out));
}

Result<Refuse> decode_refuse(std::span<const std::byte> body) {
  ByteReader in(body);
  Refuse out;
  out.code = code_from_wire(in.u8());
  out.text = read_text(in);
  return checked(in, std::move(out));
}

Result<Attach> decode_attach(std::span<const std::byte> body) {
  ByteReader in(body);
  Attach out;
  out.request = in.u32();
  out.grant_id = in.u64();
  out.proof = in.array<32>();
  return checked(in, std::move(out));
}

Result<Storage> decode_storage(std::span<const std::byte> body) {
  ByteReader in(body);
  Storage out;
  out.id = in.u64();
  out.nbytes = in.u64();
  for (std::size_t left = in.count(5); left > 0; --left) {
    Road road;
    road.transport = read_text(in);
    road.code = code_from_wire(in.u8());
    road.text = read_text(in);
    road.bytes = copy(in.blob());
    road.fd_count = in.u8();
    out.roads.push_back(std::move(road));
  }
  return checked(in, std::move(out));
}

Result<Attached> decode_attached(std::span<const std::byte> body) {
  ByteReader in(body);
  Attached out;
  out.request = in.u32();
  out.code = code_from_wire(in.u8());
  out.text = read_text(in);
  out.proof = in.array<32>();
  out.fence_slot = in.u32();
  out.fence_epoch = in.u64();
  for (std::size_t left = in.count(8); left > 0; --left) out.storages.push_back(in.u64());
  return checked(in, std::move(out));
}

Result<Release> decode_release(std::span<const std::byte> body) {
  ByteReader in(body);
  Release out;
  out.storage = in.u64();
  return checked(in, std::move(out));
}

Digest session(const Hello& hello, const Nonce& owner_nonce, std::string_view secret) {
  if (secret.empty()) {
    Sha256 hash;
    hash.update(encode(hello));
    hash.update(owner_nonce);
    return hash.finish();
  }
  std::vector<std::byte> both = encode(hello);
  both.insert(both.end(), owner_nonce.begin(), owner_nonce.end());
  return hmac_sha256(std::as_bytes(std::span(secret)), both);
}

Digest prove(const GrantKey& key, std::string_view role, const Digest& session,
             std::uint64_t grant_id) {
  ByteWriter message;
  message.text(role);
  message.raw(session);
  message.u64(grant_id);
  return hmac_sha256(key, message.view());
}

}  // namespace kvzc::wire

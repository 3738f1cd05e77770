// The messages of the control connection.
#include "core/wire.h"

#include "fuzz/target.h"

namespace kvzc {
namespace {

template <typename Decode, typename Encode>
void try_out(const Decode& decode, const Encode& encode_again, fuzz::Bytes body) {
  auto message = decode(body);
  if (!message.is_ok()) {
    KVZC_FUZZ_CHECK(message.status().code() == Code::kProtocol);
    return;
  }
  // What was read says itself again in the same bytes, once it was written by us.
  const std::vector<std::byte> once = encode_again(*message);
  const auto opened = wire::open(once);
  KVZC_FUZZ_CHECK(opened.is_ok());
  auto same = decode(opened->second);
  KVZC_FUZZ_CHECK(same.is_ok() && encode_again(*same) == once);
}

void decode_as(wire::Type type, fuzz::Bytes body) {
  const auto encode = [](const auto& message) { return wire::encode(message); };
  switch (type) {
    case wire::Type::kHello:
      return try_out(wire::decode_hello, encode, body);
    case wire::Type::kChallenge:
      return try_out(wire::decode_challenge, encode, body);
    case wire::Type::kProof:
      return try_out(wire::decode_proof, encode, body);
    case wire::Type::kWelcome:
      return try_out(wire::decode_welcome, encode, body);
    case wire::Type::kRefuse:
    case wire::Type::kBye:
      return try_out(
          wire::decode_refuse, [&](const auto& message) { return wire::encode(type, message); }, body);
    case wire::Type::kAttach:
      return try_out(wire::decode_attach, encode, body);
    case wire::Type::kStorage:
      return try_out(wire::decode_storage, encode, body);
    case wire::Type::kAttached:
      return try_out(wire::decode_attached, encode, body);
    case wire::Type::kRelease:
      return try_out(wire::decode_release, encode, body);
    case wire::Type::kKick:
      return;
  }
  KVZC_FUZZ_CHECK(false && "open() gave a type that is none");
}

}  // namespace

KVZC_FUZZ_TARGET(wire)(fuzz::Bytes input) {
  if (const auto opened = wire::open(input); opened.is_ok()) {
    KVZC_FUZZ_CHECK(wire::message_bytes(input) == input.size());
    decode_as(opened->first, opened->second);
  }
  // And as a message of any type, whatever its header would have to be.
  if (input.empty()) return;
  const auto type = static_cast<std::uint16_t>(std::to_integer<unsigned>(input[0]) % 11 + 1);
  decode_as(static_cast<wire::Type>(type), input.subspan(1));
}

}  // namespace kvzc

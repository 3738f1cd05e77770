// The messages of the control connection, as cpp/WIRE.md describes them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/sha256.h"
#include "kvzc/handle.h"
#include "kvzc/status.h"

namespace kvzc::wire {

inline constexpr std::uint16_t kProtocolVersion = 1;

enum class Type : std::uint16_t {
  kHello = 1,
  kChallenge = 2,
  kProof = 3,
  kWelcome = 4,
  kRefuse = 5,
  kAttach = 6,
  kStorage = 7,
  kAttached = 8,
  kRelease = 9,
  kKick = 10,
  kBye = 11,
};

inline constexpr std::size_t kHeaderBytes = 8;

using Nonce = std::array<std::byte, 32>;

struct Hello {
  std::uint16_t lowest_version = kProtocolVersion;
  std::uint16_t highest_version = kProtocolVersion;
  Incarnation from{};
  Incarnation to{};
  Nonce nonce{};
  std::uint64_t grant_id = 0;
  std::string engine_name;
};
struct Challenge {
  std::uint16_t version = kProtocolVersion;
  Nonce nonce{};
  Digest proof{};
  std::string engine_name;
};
// What one side has for one transport; `fd_count` of the message's descriptors are its own.
struct Offer {
  std::string transport;
  std::vector<std::byte> bytes;
  std::uint8_t fd_count = 0;
};
struct Proof {
  Digest proof{};
  std::vector<Offer> offers;
};
struct Welcome {
  std::vector<Offer> offers;
};
struct Refuse {  // Also Bye.
  Code code = Code::kOk;
  std::string text;
};
struct Attach {
  std::uint32_t request = 0;
  std::uint64_t grant_id = 0;
  Digest proof{};
};
// How one storage is reached by one transport, or why not.
struct Road {
  std::string transport;
  Code code = Code::kOk;
  std::string text;              // When code is not kOk.
  std::vector<std::byte> bytes;  // When it is.
  std::uint8_t fd_count = 0;
};
struct Storage {
  std::uint64_t id = 0;
  std::uint64_t nbytes = 0;
  std::vector<Road> roads;
};
struct Attached {
  std::uint32_t request = 0;
  Code code = Code::kOk;
  std::string text;  // When code is not kOk; else the rest.
  Digest proof{};
  std::uint32_t fence_slot = 0;
  std::uint64_t fence_epoch = 0;
  std::vector<std::uint64_t> storages;
};
struct Release {
  std::uint64_t storage = 0;
};

std::vector<std::byte> encode(const Hello& message);
std::vector<std::byte> encode(const Challenge& message);
std::vector<std::byte> encode(const Proof& message);
std::vector<std::byte> encode(const Welcome& message);
std::vector<std::byte> encode(Type type, const Refuse& message);
std::vector<std::byte> encode(const Attach& message);
std::vector<std::byte> encode(const Storage& message);
std::vector<std::byte> encode(const Attached& message);
std::vector<std::byte> encode(const Release& message);
std::vector<std::byte> encode_kick();

// Gives how long the message is that begins with this header. Requires: kHeaderBytes of it.
std::uint32_t message_bytes(std::span<const std::byte> header);
// Gives the type of a message and its body. Errors: kProtocol.
Result<std::pair<Type, std::span<const std::byte>>> open(std::span<const std::byte> bytes);
// Each reads a body. Errors: kProtocol.
Result<Hello> decode_hello(std::span<const std::byte> body);
Result<Challenge> decode_challenge(std::span<const std::byte> body);
Result<Proof> decode_proof(std::span<const std::byte> body);
Result<Welcome> decode_welcome(std::span<const std::byte> body);
Result<Refuse> decode_refuse(std::span<const std::byte> body);
Result<Attach> decode_attach(std::span<const std::byte> body);
Result<Storage> decode_storage(std::span<const std::byte> body);
Result<Attached> decode_attached(std::span<const std::byte> body);
Result<Release> decode_release(std::span<const std::byte> body);

// Names the two parties of one connection for all proofs on it: nobody can replay them elsewhere.
// Between hosts it takes the secret that both share; on one host that is empty.
Digest session(const Hello& hello, const Nonce& owner_nonce, std::string_view secret = {});
// Proves knowledge of a grant's key. `role` keeps one side's proof from serving as the other's.
Digest prove(const GrantKey& key, std::string_view role, const Digest& session,
             std::uint64_t grant_id);

}  // namespace kvzc::wire

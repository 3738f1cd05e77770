// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), with an unpredictable-bytes source.
//
// Ours because the wheel links no crypto library: the only use is to prove a grant's key once per
// connection and to detect damage in a handle. Tested against the standards' vectors and hashlib.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvzc/status.h"

namespace kvzc {

using Digest = std::array<std::byte, 32>;

class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> data);
  Digest finish();

 private:
  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, 64> buffer_;
  std::uint64_t total_bytes_ = 0;
};

Digest sha256(std::span<const std::byte> data);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);

// Compares in time that does not depend on where the two differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

// Fills with bytes from the kernel's generator.
Status fill_random(std::span<std::byte> out);

}  // namespace kvzc

#include "core/envelope.h"

#include <cstring>

#include "base/sha256.h"

namespace kvzc {
namespace {

constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kLengthAt = 8;  // After magic, version, kind and flags.
constexpr std::size_t kHeadBytes = 12;
constexpr std::size_t kChecksumBytes = 8;

}  // namespace

Status damaged(const char* what, const std::string& how) {
  return Status(Code::kBadHandle, std::string("this is not a whole ") + what + ": " + how +
                                      ". Pass on exactly what to_bytes() or to_text() gave");
}

ByteWriter begin_envelope(std::string_view magic) {
  ByteWriter out;
  out.raw(std::as_bytes(std::span(magic)));
  out.u8(kVersion);
  out.u8(0);   // Kind.
  out.u16(0);  // Flags.
  out.u32(0);  // The length, once it is known.
  return out;
}

Result<std::vector<std::byte>> seal_envelope(ByteWriter out, const char* what) {
  const std::size_t nbytes = out.size() + kChecksumBytes;
  if (nbytes > UINT32_MAX) {
    return Status(Code::kInvalidArgument, std::string("the ") + what + " is larger than 4 GiB");
  }
  out.patch_u32(kLengthAt, static_cast<std::uint32_t>(nbytes));
  const Digest checksum = sha256(out.view());
  out.raw(std::span(checksum).first(kChecksumBytes));
  return out.take();
}

Result<ByteReader> open_envelope(std::span<const std::byte> bytes, std::string_view magic,
                                 const char* what) {
  if (bytes.size() < kHeadBytes + kChecksumBytes) return damaged(what, "it is too short");
  if (std::memcmp(bytes.data(), magic.data(), magic.size()) != 0) {
    return damaged(what, "it does not begin like one");
  }
  ByteReader in(bytes.subspan(magic.size()));
  const std::uint8_t version = in.u8();
  const std::uint8_t kind = in.u8();
  const std::uint16_t flags = in.u16();
  const std::uint32_t length = in.u32();
  if (version != kVersion) {
    return Status(Code::kBadHandle, std::string("the ") + what + " has format version " +
                                        std::to_string(version) +
                                        ", this kvzc reads version 1: use the same kvzc on both "
                                        "sides");
  }
  if (length != bytes.size()) return damaged(what, "it is truncated or something follows it");
  const auto body = bytes.first(bytes.size() - kChecksumBytes);
  const Digest checksum = sha256(body);
  if (std::memcmp(checksum.data(), bytes.data() + body.size(), kChecksumBytes) != 0) {
    return damaged(what, "its checksum does not fit");
  }
  if (kind != 0 || flags != 0) {
    return Status(Code::kBadHandle, std::string("the ") + what +
                                        " is of a kind that this kvzc does not know: use the same "
                                        "kvzc on both sides");
  }
  return ByteReader(body.subspan(kHeadBytes));
}

}  // namespace kvzc

// Writing and reading the bytes of cpp/WIRE.md: little-endian, bounded, varints for counts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvzc {

class ByteWriter {
 public:
  void u8(std::uint8_t value) { out_.push_back(static_cast<std::byte>(value)); }
  void u16(std::uint16_t value) { fixed(value, 2); }
  void u32(std::uint32_t value) { fixed(value, 4); }
  void u64(std::uint64_t value) { fixed(value, 8); }
  void varint(std::uint64_t value) {
    while (value >= 0x80) {
      u8(static_cast<std::uint8_t>(value | 0x80));
      value >>= 7;
    }
    u8(static_cast<std::uint8_t>(value));
  }
  // Zigzag: small numbers of either sign are short.
  void signed_varint(std::int64_t value) {
    varint((static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63));
  }
  void raw(std::span<const std::byte> bytes) {
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  void text(std::string_view value) {
    varint(value.size());
    raw(std::as_bytes(std::span(value)));
  }
  void blob(std::span<const std::byte> bytes) {
    varint(bytes.size());
    raw(bytes);
  }
  void patch_u32(std::size_t at, std::uint32_t value) {
    for (std::size_t i = 0; i < 4; ++i) out_[at + i] = static_cast<std::byte>(value >> (8 * i));
  }

  std::size_t size() const { return out_.size(); }
  std::span<const std::byte> view() const { return out_; }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  void fixed(std::uint64_t value, int width) {
    for (int i = 0; i < width; ++i) u8(static_cast<std::uint8_t>(value >> (8 * i)));
  }
  std::vector<std::byte> out_;
};

// Reads what a stranger sent. Past the end, or on a value that cannot be, it turns bad and gives
// zeros from then on; the caller looks at is_good() once, after the last read.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  bool is_good() const { return good_; }
  bool is_at_end() const { return rest_.empty(); }
  std::size_t left() const { return rest_.size(); }
  void fail() { good_ = false, rest_ = {}; }

  std::uint8_t u8() { return static_cast<std::uint8_t>(fixed(1)); }
  std::uint16_t u16() { return static_cast<std::uint16_t>(fixed(2)); }
  std::uint32_t u32() { return static_cast<std::uint32_t>(fixed(4)); }
  std::uint64_t u64() { return fixed(8); }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const std::uint64_t byte = u8();
      // The tenth byte has room for one bit only.
      if (shift == 63 && byte > 1) break;
      value |= (byte & 0x7f) << shift;
      if (byte < 0x80) return good_ ? value : 0;
    }
    fail();
    return 0;
  }
  std::int64_t signed_varint() {
    const std::uint64_t value = varint();
    return static_cast<std::int64_t>((value >> 1) ^ (~(value & 1) + 1));
  }
  // A count of things that each take at least `least_bytes` here: never more than can follow, so
  // that no damaged count makes us reserve memory.
  std::size_t count(std::size_t least_bytes = 1) {
    const std::uint64_t value = varint();
    if (value > rest_.size() / least_bytes) {
      fail();
      return 0;
    }
    return static_cast<std::size_t>(value);
  }
  std::span<const std::byte> raw(std::size_t nbytes) {
    if (nbytes > rest_.size()) {
      fail();
      return {};
    }
    const auto out = rest_.first(nbytes);
    rest_ = rest_.subspan(nbytes);
    return out;
  }
  std::span<const std::byte> blob() { return raw(count()); }
  std::string text() {
    const auto bytes = blob();
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  template <std::size_t N>
  std::array<std::byte, N> array() {
    std::array<std::byte, N> out{};
    const auto bytes = raw(N);
    if (bytes.size() == N) std::memcpy(out.data(), bytes.data(), N);
    return out;
  }

 private:
  std::uint64_t fixed(std::size_t width) {
    const auto bytes = raw(width);
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
    }
    return value;
  }
  std::span<const std::byte> rest_;
  bool good_ = true;
};

}  // namespace kvzc

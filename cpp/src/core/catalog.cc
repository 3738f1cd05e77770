#include "kvzc/catalog.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>

#include "base/bytes.h"
#include "base/checked_math.h"
#include "base/sha256.h"
#include "base/utf8.h"

namespace kvzc {
namespace {

constexpr std::string_view kMagic = "KVZK";
constexpr std::uint8_t kVersion = 1;
constexpr std::string_view kTextPrefix = "kvzk1.";
constexpr std::size_t kPrefixBytes = 12;
constexpr std::size_t kChecksumBytes = 8;

Status damaged(const char* what) {
  return Status(Code::kBadHandle, std::string("this is not a whole catalog: ") + what +
                                      ". Pass on exactly what to_bytes() or to_text() gave");
}

std::string words(std::uint64_t address, std::uint64_t nbytes) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "0x%llx (%llu bytes)",
                static_cast<unsigned long long>(address), static_cast<unsigned long long>(nbytes));
  return text.data();
}

}  // namespace

Catalog::Catalog(std::string engine_name, std::vector<Region> regions)
    : engine_name_(std::move(engine_name)) {
  const auto by_address = [](const Piece& a, const Piece& b) {
    return std::tuple(a.address, b.end()) < std::tuple(b.address, a.end());
  };
  std::vector<Piece> all;
  for (Region& region : regions) {
    const auto number = static_cast<std::uint32_t>(regions_.size());
    std::vector<Piece> own;
    for (const TensorView& tensor : region.handle.view.tensors) {
      const Result<Extent> extent = extent_of(tensor);
      if (!extent.is_ok() || extent->begin == extent->end) continue;
      const auto offset = static_cast<std::uint64_t>(tensor.offset + extent->begin);
      const auto nbytes = static_cast<std::uint64_t>(extent->end - extent->begin);
      own.push_back({region.storage_addresses[tensor.storage] + offset, nbytes, number,
                     tensor.storage, offset});
    }
    std::sort(own.begin(), own.end(), by_address);
    const std::size_t begin = all.size();
    for (const Piece& piece : own) {
      // Tensors of one storage that follow each other can be reached as one.
      if (all.size() > begin && all.back().storage == piece.storage &&
          piece.address <= all.back().end()) {
        all.back().nbytes = std::max(all.back().end(), piece.end()) - all.back().address;
      } else {
        all.push_back(piece);
      }
    }
    regions_.push_back(std::move(region.handle));
  }
  std::sort(all.begin(), all.end(), by_address);
  for (const Piece& piece : all) {
    if (pieces_.empty() || piece.end() > pieces_.back().end()) pieces_.push_back(piece);
  }
}

Result<RemoteView> Catalog::resolve(std::uint64_t address, std::uint64_t nbytes) const {
  if (nbytes == 0) return Status(Code::kInvalidArgument, "0 bytes are nowhere; ask for 1 or more");
  // Of those that begin early enough the last one ends latest.
  const auto after = std::upper_bound(
      pieces_.begin(), pieces_.end(), address,
      [](std::uint64_t at, const Piece& piece) { return at < piece.address; });
  if (after != pieces_.begin()) {
    const Piece& piece = *std::prev(after);
    const std::uint64_t at = address - piece.address;
    if (range_fits(at, nbytes, piece.nbytes)) {
      TensorView bytes;
      bytes.storage = piece.storage;
      bytes.offset = static_cast<std::int64_t>(piece.offset + at);
      bytes.axes.push_back({static_cast<std::int64_t>(nbytes), 1, nullptr});
      RemoteView out{regions_[piece.region].handle, {}};
      out.view.tensors.push_back(std::move(bytes));
      return out;
    }
  }
  std::string nearest;
  if (after != pieces_.begin()) {
    nearest += "; before it lie " + words(std::prev(after)->address, std::prev(after)->nbytes);
  }
  if (after != pieces_.end()) nearest += "; after it " + words(after->address, after->nbytes);
  return Status(Code::kOutOfRange,
                words(address, nbytes) + " are not within one region that engine '" + engine_name_ +
                    "' had registered when this catalog was made" + nearest +
                    ". What was registered since needs a fresh catalog");
}

std::vector<Catalog::Range> Catalog::ranges() const {
  std::vector<Range> out;
  out.reserve(pieces_.size());
  for (const Piece& piece : pieces_) out.push_back({piece.address, piece.nbytes});
  return out;
}

Result<std::vector<std::byte>> Catalog::encode() const {
  ByteWriter out;
  out.raw(std::as_bytes(std::span(kMagic)));
  out.u8(kVersion);
  out.u8(0);
  out.u16(0);  // Flags.
  const std::size_t length_at = out.size();
  out.u32(0);
  out.text(engine_name_);
  out.varint(regions_.size());
  for (const RemoteView& region : regions_) {
    Result<std::vector<std::byte>> handle = encode_handle(region.handle->info);
    if (!handle.is_ok()) return handle.status();
    out.blob(*handle);
  }
  out.varint(pieces_.size());
  for (const Piece& piece : pieces_) {
    out.u64(piece.address);
    out.varint(piece.nbytes);
    out.varint(piece.region);
    out.varint(piece.storage);
    out.varint(piece.offset);
  }
  if (out.size() + kChecksumBytes > UINT32_MAX) {
    return Status(Code::kInvalidArgument, "the catalog is larger than 4 GiB");
  }
  out.patch_u32(length_at, static_cast<std::uint32_t>(out.size() + kChecksumBytes));
  const Digest checksum = sha256(out.view());
  out.raw(std::span(checksum).first(kChecksumBytes));
  return out.take();
}

std::string Catalog::to_text(std::span<const std::byte> encoded) const {
  return bytes_to_text(kTextPrefix, encoded);
}

Result<Catalog> Catalog::from_text(std::string_view text) {
  Result<std::vector<std::byte>> bytes = bytes_from_text(kTextPrefix, text);
  return bytes.is_ok() ? decode(*bytes) : Result<Catalog>(bytes.status());
}

Result<Catalog> Catalog::decode(std::span<const std::byte> bytes) {
  if (bytes.size() < kPrefixBytes + kChecksumBytes) return damaged("it is too short");
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return damaged("it does not begin like one");
  }
  ByteReader in(bytes.subspan(kMagic.size()));
  const std::uint8_t version = in.u8();
  const std::uint8_t kind = in.u8();
  const std::uint16_t flags = in.u16();
  const std::uint32_t length = in.u32();
  if (version != kVersion || kind != 0 || flags != 0) {
    return Status(Code::kBadHandle, "the catalog has format version " + std::to_string(version) +
                                        ", or is of a kind, that this kvzc does not read: use the "
                                        "same kvzc on both sides");
  }
  if (length != bytes.size()) return damaged("it is truncated or something follows it");
  const auto body = bytes.first(bytes.size() - kChecksumBytes);
  const Digest checksum = sha256(body);
  if (std::memcmp(checksum.data(), bytes.data() + body.size(), kChecksumBytes) != 0) {
    return damaged("its checksum does not fit");
  }
  in = ByteReader(body.subspan(kPrefixBytes));
  Catalog out;
  out.engine_name_ = in.text();
  if (!is_utf8(out.engine_name_)) return damaged("a name is not UTF-8");
  for (std::size_t left = in.count(); left > 0; --left) {
    Result<RemoteView> region = RemoteView::from_bytes(in.blob());
    if (!region.is_ok()) return region.status();
    out.regions_.push_back(region.take());
  }
  for (std::size_t left = in.count(12); left > 0; --left) {
    Piece piece{};
    piece.address = in.u64();
    piece.nbytes = in.varint();
    const std::uint64_t region = in.varint();
    const std::uint64_t storage = in.varint();
    piece.offset = in.varint();
    if (!in.is_good() || region >= out.regions_.size()) return damaged("a range is unreadable");
    const auto& storages = out.regions_[region].handle->info.storage_nbytes;
    std::uint64_t end = 0;
    if (piece.nbytes == 0 || storage >= storages.size() || !range_fits(piece.offset, piece.nbytes, storages[storage]) ||
        __builtin_add_overflow(piece.address, piece.nbytes, &end)) {
      return damaged("a range reaches beyond its storage");
    }
    if (!out.pieces_.empty() &&
        (piece.address <= out.pieces_.back().address || end <= out.pieces_.back().end())) {
      return damaged("its ranges are not in order");
    }
    piece.region = static_cast<std::uint32_t>(region);
    piece.storage = static_cast<std::uint32_t>(storage);
    out.pieces_.push_back(piece);
  }
  if (!in.is_good() || !in.is_at_end()) return damaged("its parts do not add up");
  return out;
}

}  // namespace kvzc

#include "kvzc/catalog.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <tuple>

#include "base/checked_math.h"
#include "base/utf8.h"
#include "core/envelope.h"

namespace kvzc {
namespace {

constexpr std::string_view kMagic = "KVZK";
constexpr std::string_view kTextPrefix = "kvzk1.";

Status damaged(const std::string& how) { return kvzc::damaged("catalog", how); }

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
  ByteWriter out = begin_envelope(kMagic);
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
  return seal_envelope(std::move(out), "catalog");
}

std::string Catalog::to_text(std::span<const std::byte> encoded) const {
  return bytes_to_text(kTextPrefix, encoded);
}

Result<Catalog> Catalog::from_text(std::string_view text) {
  Result<std::vector<std::byte>> bytes = bytes_from_text(kTextPrefix, text);
  return bytes.is_ok() ? decode(*bytes) : Result<Catalog>(bytes.status());
}

Result<Catalog> Catalog::decode(std::span<const std::byte> bytes) {
  Result<ByteReader> fields = open_envelope(bytes, kMagic, "catalog");
  if (!fields.is_ok()) return fields.status();
  ByteReader& in = *fields;
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
    if (piece.nbytes == 0 || storage >= storages.size() ||
        !range_fits(piece.offset, piece.nbytes, storages[storage]) ||
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

// Catalog: all memory of an engine that is registered, found by the owner's own addresses.
//
// For callers that think in (address, length), and exchange these by channels of their own. A catalog is
// a snapshot: what is registered later needs a fresh one; what was closed since is refused as revoked.
// It carries the handles of all those regions, so whoever has it may put into and get from all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvzc/handle.h"
#include "kvzc/status.h"

namespace kvzc {

// A value, constant once made.
class Catalog {
 public:
  // Consecutive bytes at the owner.
  struct Range {
    std::uint64_t address;
    std::uint64_t nbytes;
  };

  // A region's handle, and where each of its storages lies at the owner. All bytes from the first to the
  // last of a tensor are in the catalog, also those between its rows.
  struct Region {
    RemoteView handle;
    std::vector<std::uint64_t> storage_addresses;
  };

  Catalog() = default;
  Catalog(std::string engine_name, std::vector<Region> regions);

  // Gives these bytes as uint8[nbytes]. Errors: kOutOfRange, naming them, when they are not within one
  // range; kInvalidArgument for 0 bytes.
  Result<RemoteView> resolve(std::uint64_t address, std::uint64_t nbytes) const;
  // In the order of their addresses; none lies within another.
  std::vector<Range> ranges() const;
  const std::string& engine_name() const { return engine_name_; }

  // cpp/WIRE.md gives the bytes.
  Result<std::vector<std::byte>> encode() const;
  std::string to_text(std::span<const std::byte> encoded) const;
  // Errors: kBadHandle for anything truncated, damaged, from a later version, or out of bounds.
  static Result<Catalog> decode(std::span<const std::byte> bytes);
  static Result<Catalog> from_text(std::string_view text);

 private:
  // Bytes of one storage of one handle.
  struct Piece {
    std::uint64_t address;
    std::uint64_t nbytes;
    std::uint32_t region;
    std::uint32_t storage;
    std::uint64_t offset;
    std::uint64_t end() const { return address + nbytes; }
  };
  std::string engine_name_;
  std::vector<RemoteView> regions_;
  std::vector<Piece> pieces_;  // By address; then by end as well, since none covers another.
};

}  // namespace kvzc

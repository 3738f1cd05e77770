// RdmaMemory: memory of a peer's, named by the keys that its devices gave it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvzc/transport.h"

namespace kvzc::rdma {

class RdmaMemory final : public RemoteMemory {
 public:
  // The keys of each of the owner's rails; key number offset / part_bytes is for that byte.
  struct RailKeys {
    std::uint64_t part_bytes = 0;
    std::vector<std::uint32_t> keys;

    bool is_whole() const { return keys.size() == 1; }
    std::uint32_t key(std::uint64_t offset) const {
      return keys[is_whole() ? 0 : offset / part_bytes];
    }
  };

  RdmaMemory(std::uint64_t address, std::uint64_t nbytes, std::vector<RailKeys> rails, bool is_own)
      : address_(address), nbytes_(nbytes), rails_(std::move(rails)), is_own_(is_own) {}

  std::uint64_t nbytes() const override { return nbytes_; }
  std::optional<std::int64_t> offset_of(const MemoryPiece& piece) const override {
    if (!is_own_) return std::nullopt;
    return static_cast<std::int64_t>(reinterpret_cast<std::uint64_t>(piece.data) - address_);
  }
  std::uint64_t address(std::uint64_t offset) const { return address_ + offset; }
  std::size_t rail_count() const { return rails_.size(); }
  const RailKeys& rail(std::size_t index) const { return rails_[index]; }

 private:
  const std::uint64_t address_;
  const std::uint64_t nbytes_;
  const std::vector<RailKeys> rails_;
  const bool is_own_;  // Of an engine in this very process.
};

}  // namespace kvzc::rdma

// PeerMemory: memory of another engine on this host, by the three ways there are to its bytes.
#pragma once

#include <sys/uio.h>

#include <span>

#include "base/shared_memory.h"
#include "kvzc/transport.h"

namespace kvzc::shm {

class PeerMemory : public RemoteMemory {
 public:
  // Where it lies in this address space; null when only the kernel can copy there.
  virtual std::byte* data() const = 0;
};

// A sealed memfd of the peer's, mapped here.
class MappedMemory final : public PeerMemory {
 public:
  explicit MappedMemory(SharedMemory memory) : memory_(std::move(memory)) {}
  std::uint64_t nbytes() const override { return memory_.nbytes(); }
  std::byte* data() const override { return memory_.data(); }
  std::optional<std::int64_t> offset_of(const MemoryPiece& piece) const override {
    if (piece.shared == nullptr || piece.shared->identity() != memory_.identity()) {
      return std::nullopt;
    }
    return piece.data - piece.shared->data();
  }

 private:
  SharedMemory memory_;
};

// Private memory of another engine in this very process.
class OwnProcessMemory final : public PeerMemory {
 public:
  OwnProcessMemory(std::byte* data, std::uint64_t nbytes) : data_(data), nbytes_(nbytes) {}
  std::uint64_t nbytes() const override { return nbytes_; }
  std::byte* data() const override { return data_; }
  std::optional<std::int64_t> offset_of(const MemoryPiece& piece) const override {
    if (piece.shared != nullptr) return std::nullopt;
    return piece.data - data_;
  }

 private:
  std::byte* const data_;
  const std::uint64_t nbytes_;
};

// Private memory of another process: the kernel copies, process_vm_writev(2) and readv. Memory that
// vanishes there is an error here, never a signal.
class OtherProcessMemory final : public PeerMemory {
 public:
  // Looks whether the kernel lets us. Errors: kTransportUnavailable with the reason and what would
  // help.
  static Result<std::shared_ptr<RemoteMemory>> open(const PeerProcess& owner, std::uint64_t address,
                                                    std::uint64_t nbytes);

  std::uint64_t nbytes() const override { return nbytes_; }
  std::byte* data() const override { return nullptr; }
  std::optional<std::int64_t> offset_of(const MemoryPiece&) const override { return std::nullopt; }

  // Copies between pieces of this process and as many bytes from `offsets` on. Looks before each
  // call whether the process still lives, so that a later one of the same number is never written
  // to. Errors: kPeerLost; kSystem when the memory is not there any more.
  struct Piece {
    std::byte* local;
    std::uint64_t offset;
    std::uint64_t nbytes;
  };
  Status copy(Direction direction, std::span<const Piece> pieces) const;

 private:
  OtherProcessMemory(const PeerProcess& owner, std::uint64_t address, std::uint64_t nbytes)
      : owner_(owner), address_(address), nbytes_(nbytes) {}

  const PeerProcess owner_;
  const std::uint64_t address_;
  const std::uint64_t nbytes_;
};

}  // namespace kvzc::shm

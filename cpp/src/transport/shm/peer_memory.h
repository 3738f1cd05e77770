// PeerMemory: memory of another engine on this host, by the three ways there are to its bytes.
#pragma once

#include <sys/uio.h>

#include <array>
#include <span>

#include "base/shared_memory.h"
#include "kvzc/transport.h"

namespace kvzc::shm {

class PeerMemory : public RemoteMemory {
 public:
  // Where it lies in this address space; null when only the kernel can copy there.
  virtual std::byte* data() const = 0;
  // How it is reached, in words.
  virtual const char* path() const = 0;
};

// A sealed memfd of the peer's, mapped here.
class MappedMemory final : public PeerMemory {
 public:
  explicit MappedMemory(SharedMemory memory) : memory_(std::move(memory)) {}
  std::uint64_t nbytes() const override { return memory_.nbytes(); }
  std::byte* data() const override { return memory_.data(); }
  const char* path() const override { return "mapped: this process copies straight into and out of it"; }
  std::optional<std::int64_t> offset_of(const MemoryPiece& piece) const override {
    if (piece.shared == nullptr || piece.shared->identity() != memory_.identity()) {
      return std::nullopt;
    }
    return piece.data - piece.shared->data();
  }

 private:
  SharedMemory memory_;
};

// Where private memory lies, as its owner says. The witness shows that the process at the other end of
// the connection is the one that owns the memory: bytes that it has at that address.
struct PrivateAddress {
  using Witness = std::array<std::byte, 16>;

  std::uint64_t data = 0;
  std::uint64_t witness_at = 0;
  Witness witness{};
};

// Private memory of another engine in this very process.
class OwnProcessMemory final : public PeerMemory {
 public:
  OwnProcessMemory(std::byte* data, std::uint64_t nbytes) : data_(data), nbytes_(nbytes) {}
  std::uint64_t nbytes() const override { return nbytes_; }
  std::byte* data() const override { return data_; }
  const char* path() const override { return "in this very process: copied straight"; }
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
  // Looks whether the kernel lets us, and whether it is the right process; one's own will do.
  // Errors: kTransportUnavailable with the reason and what would help.
  static Result<std::shared_ptr<RemoteMemory>> open(const PeerProcess& owner,
                                                    const PrivateAddress& address,
                                                    std::uint64_t nbytes);

  std::uint64_t nbytes() const override { return nbytes_; }
  std::byte* data() const override { return nullptr; }
  const char* path() const override {
    return "private to the other process: the kernel copies (process_vm_writev), at about a third of the "
           "speed; the owner's kvzc.empty(shape, dtype) or kvzc.share(tensor) would have it mapped";
  }
  std::optional<std::int64_t> offset_of(const MemoryPiece&) const override { return std::nullopt; }

  // Copies between pieces of this process and of that one. Looks before each call whether it still
  // is that process, by its pidfd and its witness, so that a later one of the same number, or
  // another program in it, is not written to. Errors: kPeerLost; kSystem when the memory is not
  // there any more.
  struct Piece {
    std::byte* local;
    std::uint64_t offset;
    std::uint64_t nbytes;
  };
  Status copy(Direction direction, std::span<const Piece> pieces) const;

 private:
  OtherProcessMemory(const PeerProcess& owner, const PrivateAddress& address, std::uint64_t nbytes)
      : owner_(owner), address_(address), nbytes_(nbytes) {}
  // Gives 0, or why the process cannot be reached: an errno value, ESRCH also for a wrong one.
  int look_at_owner() const;

  const PeerProcess owner_;
  const PrivateAddress address_;
  const std::uint64_t nbytes_;
};

}  // namespace kvzc::shm

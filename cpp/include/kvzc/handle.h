// RemoteHandle: a grant in the hands of somebody else, as bytes and as something to slice.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvzc/status.h"
#include "kvzc/transport.h"
#include "kvzc/view.h"

namespace kvzc {

using Incarnation = std::array<std::byte, 16>;  // Random per engine start.
using GrantKey = std::array<std::byte, 32>;     // Unguessable; travels in the handle alone.

enum class AddressKind : std::uint8_t { kUnix = 1, kTcp = 2 };

struct EngineAddress {
  AddressKind kind = AddressKind::kUnix;
  std::string text;  // kUnix: a name in the abstract socket namespace.
};

// What a handle says; cpp/WIRE.md gives its bytes.
struct HandleInfo {
  Incarnation incarnation{};
  std::string engine_name;
  std::vector<EngineAddress> addresses;
  std::uint64_t grant_id = 0;
  Access access = Access::kBoth;
  std::uint8_t device_kind = 0;  // 0: CPU.
  GrantKey key{};
  std::vector<std::uint64_t> storage_nbytes;
  View view;
};

// Errors: kInvalidArgument when names or extents do not fit the format.
Result<std::vector<std::byte>> encode_handle(const HandleInfo& info);
// Errors: kBadHandle for anything truncated, damaged, from a later version, or out of bounds.
Result<HandleInfo> decode_handle(std::span<const std::byte> bytes);

// Base64 for URLs, after a prefix that says what it is. Errors: kBadHandle.
std::string bytes_to_text(std::string_view prefix, std::span<const std::byte> bytes);
Result<std::vector<std::byte>> bytes_from_text(std::string_view prefix, std::string_view text);
// The same for handles.
std::string handle_to_text(std::span<const std::byte> bytes);
Result<std::vector<std::byte>> handle_from_text(std::string_view text);

// A view of memory that another engine granted. A value; copies share the handle.
struct RemoteView {
  // The handle and what engines remember about it. Thread: any.
  struct Shared {
    HandleInfo info;

    // What one engine keeps here. Stays as long as the handle, so that who looks needs no lock.
    struct Bound {
      Incarnation engine;
      std::shared_ptr<void> binding;
      const Bound* next = nullptr;
    };
    std::atomic<const Bound*> bound{nullptr};

    Shared() = default;
    ~Shared();
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;
    // Gives what the engine keeps here, or null.
    void* find(const Incarnation& engine) const;
    // Keeps `binding` for it, unless it keeps one already; gives the one that is kept.
    void* keep(const Incarnation& engine, std::shared_ptr<void> binding);
  };
  std::shared_ptr<Shared> handle;
  View view;

  static Result<RemoteView> from_bytes(std::span<const std::byte> bytes);
  static Result<RemoteView> from_text(std::string_view text);
  Result<RemoteView> index(std::span<const Index> indices) const;
  Result<RemoteView> permute(std::span<const std::int64_t> dims) const;
  Result<RemoteView> view_as(DType dtype) const;
};

// Gives 32 hexadecimal digits.
std::string incarnation_text(const Incarnation& incarnation);

}  // namespace kvzc

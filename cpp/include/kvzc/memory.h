// Local memory: what can be shared, what is registered, and views of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvzc/status.h"
#include "kvzc/transport.h"
#include "kvzc/view.h"

namespace kvzc {

class SharedMemory;
struct RegionRecord;

// Keeps something alive that is not ours (a tensor, an array): dropping the last copy lets it go.
// May be dropped on any thread.
using KeepAlive = std::shared_ptr<void>;

// Looks at bytes of this process that somebody names by their address: gives whether they can be
// written. Errors: kInvalidArgument, naming the first byte that is not mapped, or not readable. Cost:
// reads the list of the process's mappings.
Result<bool> is_writable_memory(std::uint64_t address, std::uint64_t nbytes);

// One piece of memory that every local transport can map: a sealed memfd.
class SharedAllocation {
 public:
  explicit SharedAllocation(std::unique_ptr<SharedMemory> memory);
  ~SharedAllocation();
  std::byte* data() const;
  std::uint64_t nbytes() const;
  const SharedMemory& memory() const { return *memory_; }

 private:
  std::unique_ptr<SharedMemory> memory_;
};

// Makes sharable memory and finds it again by address. One may serve several engines.
// Thread: any.
class SharedAllocator {
 public:
  // Allocates at once. Errors: kInvalidArgument for 0 bytes, kLimitExceeded with the remedy.
  Result<std::shared_ptr<SharedAllocation>> allocate(std::uint64_t nbytes);
  // Gives the allocation that holds all of [data, data + nbytes), or null.
  std::shared_ptr<SharedAllocation> find(const std::byte* data, std::uint64_t nbytes);

 private:
  std::mutex mutex_;
  std::map<const std::byte*, std::weak_ptr<SharedAllocation>> allocations_;  // Guarded by mutex_.
};

// A tensor as its owner describes it, before registration. Addresses, not offsets.
struct TensorSpec {
  std::string name;  // Only in groups.
  DType dtype = DType::kUint8;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides_bytes;
  std::byte* data = nullptr;  // Element (0, 0, ...).
  std::byte* storage_data = nullptr;
  std::uint64_t storage_nbytes = 0;
  KeepAlive keep_alive;
};

// One piece of local memory that an engine knows. Counted; the last holder lets it go.
struct LocalStorage {
  std::uint64_t id = 0;  // Unique in its engine.
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  std::shared_ptr<SharedAllocation> allocation;  // Null: ordinary, private memory.
  KeepAlive keep_alive;
  mutable Registrations registrations;  // After what it registers, so that it goes before.

  MemoryPiece piece() const {
    return {data, nbytes, allocation ? &allocation->memory() : nullptr, &registrations};
  }
};

// What a view of local memory keeps alive.
struct RegionMemory {
  std::vector<std::shared_ptr<LocalStorage>> storages;
  std::weak_ptr<RegionRecord> region;  // Empty: borrowed for one transfer.
};

// A view of local memory: the source or target of an operation.
struct LocalView {
  std::shared_ptr<const RegionMemory> memory;
  View view;

  Result<LocalView> index(std::span<const Index> indices) const;
  Result<LocalView> permute(std::span<const std::int64_t> dims) const;
  Result<LocalView> view_as(DType dtype) const;
};

}  // namespace kvzc

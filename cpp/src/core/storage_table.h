// StorageTable: the pieces of local memory that an engine has registered, each once.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "kvzc/memory.h"

namespace kvzc {

// Thread: any.
class StorageTable {
 public:
  explicit StorageTable(std::shared_ptr<SharedAllocator> allocator)
      : allocator_(std::move(allocator)) {}

  // Counts one more registration of the storage that `spec` lies in; makes it if need be.
  std::shared_ptr<LocalStorage> acquire(const TensorSpec& spec);
  // Counts one less; gives whether it was the last.
  bool release(const std::shared_ptr<LocalStorage>& storage);
  // Gives a registered storage that holds all of [data, data + nbytes), or null.
  std::shared_ptr<LocalStorage> find(const std::byte* data, std::uint64_t nbytes);
  // Makes a storage that is not in the table, for one transfer.
  std::shared_ptr<LocalStorage> make_temporary(const TensorSpec& spec) const;
  // Says what lies nearest to an address, for errors.
  std::string describe_nearest(const std::byte* data);
  std::size_t size();

 private:
  struct Entry {
    std::shared_ptr<LocalStorage> storage;
    std::uint64_t registrations = 0;
  };
  // What `spec` lies in: a sharable allocation as a whole, or its own storage.
  std::shared_ptr<LocalStorage> describe_storage(const TensorSpec& spec) const;
  Entry* find_entry(const std::byte* data, std::uint64_t nbytes) KVZC_REQUIRES(mutex_);

  const std::shared_ptr<SharedAllocator> allocator_;
  Mutex mutex_;  // Guards the rest.
  std::multimap<const std::byte*, Entry> entries_ KVZC_GUARDED_BY(mutex_);
  // What was found last, by address: a put from the same tensor again takes as long with many
  // storages as with one. Points into entries_.
  std::array<Entry*, 256> recent_ KVZC_GUARDED_BY(mutex_){};
  std::uint64_t next_id_ KVZC_GUARDED_BY(mutex_) = 1;
};

}  // namespace kvzc

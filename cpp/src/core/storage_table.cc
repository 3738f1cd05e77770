#include "core/storage_table.h"

#include <algorithm>
#include <sstream>

#include "base/checked_math.h"

namespace kvzc {
namespace {

// Where in a table of so many places an address belongs; neighbours are apart.
std::size_t place_of(const std::byte* data, std::size_t places) {
  return (reinterpret_cast<std::uintptr_t>(data) * 0x9e3779b97f4a7c15u >> 32) % places;
}

}  // namespace

StorageTable::Entry* StorageTable::find_entry(const std::byte* data, std::uint64_t nbytes) {
  Entry*& recent = recent_[place_of(data, recent_.size())];
  const auto holds_it = [&](const Entry& entry) {
    const LocalStorage& storage = *entry.storage;
    return data >= storage.data &&
           range_fits(static_cast<std::uint64_t>(data - storage.data), nbytes, storage.nbytes);
  };
  if (recent != nullptr && holds_it(*recent)) return recent;
  // Backwards from the last one that begins at or before the address. Storages seldom overlap, so
  // the first look nearly always decides; an overlapping one that is missed costs a second
  // registration of the same bytes and nothing else.
  auto at = entries_.upper_bound(data);
  for (int looks = 0; at != entries_.begin() && looks < 4; ++looks) {
    --at;
    if (holds_it(at->second)) return recent = &at->second;
  }
  return nullptr;
}

std::shared_ptr<LocalStorage> StorageTable::describe_storage(const TensorSpec& spec) const {
  auto storage = std::make_shared<LocalStorage>();
  storage->allocation = allocator_->find(spec.storage_data, spec.storage_nbytes);
  storage->data = storage->allocation ? storage->allocation->data() : spec.storage_data;
  storage->nbytes = storage->allocation ? storage->allocation->nbytes() : spec.storage_nbytes;
  storage->keep_alive = spec.keep_alive;
  return storage;
}

std::shared_ptr<LocalStorage> StorageTable::acquire(const TensorSpec& spec) {
  std::shared_ptr<LocalStorage> storage = describe_storage(spec);
  const MutexLock lock(mutex_);
  Entry* entry = find_entry(storage->data, storage->nbytes);
  if (entry == nullptr) {
    storage->id = next_id_++;
    std::byte* const data = storage->data;
    entry = &entries_.emplace(data, Entry{std::move(storage), 0})->second;
  }
  ++entry->registrations;
  return entry->storage;
}

bool StorageTable::release(const std::shared_ptr<LocalStorage>& storage) {
  const MutexLock lock(mutex_);
  auto [at, end] = entries_.equal_range(storage->data);
  for (; at != end; ++at) {
    if (at->second.storage != storage) continue;
    if (--at->second.registrations > 0) return false;
    std::replace(recent_.begin(), recent_.end(), &at->second, static_cast<Entry*>(nullptr));
    entries_.erase(at);
    return true;
  }
  return false;
}

std::shared_ptr<LocalStorage> StorageTable::find(const std::byte* data, std::uint64_t nbytes) {
  const MutexLock lock(mutex_);
  const Entry* entry = find_entry(data, nbytes);
  return entry == nullptr ? nullptr : entry->storage;
}

std::shared_ptr<LocalStorage> StorageTable::make_temporary(const TensorSpec& spec) const {
  return describe_storage(spec);
}

std::string StorageTable::describe_nearest(const std::byte* data) {
  const MutexLock lock(mutex_);
  if (entries_.empty()) return "nothing is registered";
  auto at = entries_.upper_bound(data);
  if (at != entries_.begin()) --at;
  const LocalStorage& storage = *at->second.storage;
  std::ostringstream text;
  text << "the nearest registered memory is " << static_cast<const void*>(storage.data) << " to "
       << static_cast<const void*>(storage.data + storage.nbytes);
  return text.str();
}

std::size_t StorageTable::size() {
  const MutexLock lock(mutex_);
  return entries_.size();
}

}  // namespace kvzc

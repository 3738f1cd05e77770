#include "kvzc/memory.h"

#include "base/checked_math.h"
#include "base/shared_memory.h"

namespace kvzc {

SharedAllocation::SharedAllocation(std::unique_ptr<SharedMemory> memory)
    : memory_(std::move(memory)) {}
SharedAllocation::~SharedAllocation() = default;
std::byte* SharedAllocation::data() const { return memory_->data(); }
std::uint64_t SharedAllocation::nbytes() const { return memory_->nbytes(); }

Result<std::shared_ptr<SharedAllocation>> SharedAllocator::allocate(std::uint64_t nbytes) {
  Result<SharedMemory> memory = SharedMemory::create("kvzc-memory", nbytes);
  if (!memory.is_ok()) return memory.status();
  auto out = std::make_shared<SharedAllocation>(std::make_unique<SharedMemory>(memory.take()));
  std::lock_guard lock(mutex_);
  std::erase_if(allocations_, [](const auto& entry) { return entry.second.expired(); });
  allocations_[out->data()] = out;
  return out;
}

std::shared_ptr<SharedAllocation> SharedAllocator::find(const std::byte* data,
                                                        std::uint64_t nbytes) {
  std::lock_guard lock(mutex_);
  auto after = allocations_.upper_bound(data);
  if (after == allocations_.begin()) return nullptr;
  std::shared_ptr<SharedAllocation> found = std::prev(after)->second.lock();
  if (!found) return nullptr;
  const auto offset = static_cast<std::uint64_t>(data - found->data());
  return range_fits(offset, nbytes, found->nbytes()) ? found : nullptr;
}

namespace {

Result<LocalView> of_same_memory(const LocalView& view, Result<View> changed) {
  if (!changed.is_ok()) return changed.status();
  return LocalView{view.memory, changed.take()};
}

}  // namespace

Result<LocalView> LocalView::index(std::span<const Index> indices) const {
  return of_same_memory(*this, index_view(view, indices));
}

Result<LocalView> LocalView::permute(std::span<const std::int64_t> dims) const {
  return of_same_memory(*this, permute_view(view, dims));
}

Result<LocalView> LocalView::view_as(DType dtype) const {
  return of_same_memory(*this, kvzc::view_as(view, dtype));
}

}  // namespace kvzc

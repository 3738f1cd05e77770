#include "kvzc/memory.h"

#include <errno.h>

#include <charconv>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/checked_math.h"
#include "base/shared_memory.h"

namespace kvzc {

namespace {

// One line of /proc/self/maps: "55e0c8a00000-55e0c8a21000 rw-p ...".
struct Mapping {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool is_readable = false;
  bool is_writable = false;
};

bool parse(const std::string& line, Mapping* out) {
  const char* const last = line.data() + line.size();
  const auto begin = std::from_chars(line.data(), last, out->begin, 16);
  if (begin.ec != std::errc() || begin.ptr == last || *begin.ptr != '-') return false;
  const auto end = std::from_chars(begin.ptr + 1, last, out->end, 16);
  if (end.ec != std::errc() || last - end.ptr < 4) return false;
  out->is_readable = end.ptr[1] == 'r';
  out->is_writable = end.ptr[2] == 'w';
  return true;
}

std::string hexadecimal(std::uint64_t number) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(number));
  return text;
}

}  // namespace

Result<bool> is_writable_memory(std::uint64_t address, std::uint64_t nbytes) {
  std::uint64_t end = 0;
  if (nbytes == 0 || __builtin_add_overflow(address, nbytes, &end)) {
    return Status(Code::kInvalidArgument, std::to_string(nbytes) + " bytes at " + hexadecimal(address) +
                                              " are no memory; 1 byte or more are, below 2**64");
  }
  std::ifstream maps("/proc/self/maps");
  if (!maps) return Status::system(errno, "looking at the memory of this process");
  std::uint64_t at = address;  // All before it is there.
  bool is_writable = true;
  Mapping mapping;
  for (std::string line; at < end && std::getline(maps, line);) {
    if (!parse(line, &mapping) || mapping.end <= at) continue;
    if (mapping.begin > at || !mapping.is_readable) break;
    is_writable = is_writable && mapping.is_writable;
    at = mapping.end;
  }
  if (at >= end) return is_writable;
  return Status(Code::kInvalidArgument, "of the " + std::to_string(nbytes) + " bytes at " +
                                            hexadecimal(address) + " those from " + hexadecimal(at) +
                                            " on are not mapped in this process, or not readable");
}

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

#include "base/fd.h"
#include "kvzc/transport.h"

namespace kvzc {

Blob::Blob() = default;
Blob::~Blob() = default;
Blob::Blob(Blob&&) noexcept = default;
Blob& Blob::operator=(Blob&&) noexcept = default;

void Operation::fail(Status why) {
  std::lock_guard lock(failure_mutex_);
  if (!failure_.is_ok()) return;
  failure_ = std::move(why);
  failed_.store(true, std::memory_order_seq_cst);
}

Status Operation::failure() const {
  if (!has_failed()) return Status::ok();
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

void Operation::clear_failure() {
  failure_ = Status();
  failed_.store(false, std::memory_order_relaxed);
}

}  // namespace kvzc

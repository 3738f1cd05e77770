// Status and Result: what went wrong, as a value.
//
// The core throws nothing. A function that can fail returns a Status, or a Result<T> when it also
// has something to give. One list below makes the enum, the names and the Python classes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvzc {

// X(code, name, Python built-in that the exception also is). The numbers travel on the wire
// (cpp/WIRE.md): append, never reorder.
#define KVZC_STATUS_CODES(X)                                   \
  X(kInvalidArgument, InvalidArgument, ValueError)             \
  X(kOutOfRange, OutOfRange, IndexError)                       \
  X(kLayoutMismatch, LayoutMismatch, ValueError)               \
  X(kBadHandle, BadHandle, ValueError)                         \
  X(kNotRegistered, NotRegistered, ValueError)                 \
  X(kStaleHandle, StaleHandle, ConnectionError)                \
  X(kRevoked, Revoked, PermissionError)                        \
  X(kAccessDenied, AccessDenied, PermissionError)              \
  X(kTimedOut, TimedOut, TimeoutError)                         \
  X(kWouldBlock, WouldBlock, BlockingIOError)                  \
  X(kPeerLost, PeerLost, ConnectionError)                      \
  X(kCancelled, Cancelled, RuntimeError)                       \
  X(kClosed, Closed, RuntimeError)                             \
  X(kTransportUnavailable, TransportUnavailable, RuntimeError) \
  X(kUnsupported, Unsupported, NotImplementedError)            \
  X(kLimitExceeded, LimitExceeded, OSError)                    \
  X(kForkedEngine, ForkedEngine, RuntimeError)                 \
  X(kProtocol, ProtocolError, ConnectionError)                 \
  X(kSystem, SystemFailure, OSError)

enum class Code : std::uint8_t {
  kOk = 0,
#define KVZC_ENUM(code, name, builtin) code,
  KVZC_STATUS_CODES(KVZC_ENUM)
#undef KVZC_ENUM
};

inline constexpr std::size_t kCodeCount = 1
#define KVZC_COUNT(code, name, builtin) +1
    KVZC_STATUS_CODES(KVZC_COUNT)
#undef KVZC_COUNT
    ;

// Gives the name of a code, as Python spells the exception.
std::string_view code_name(Code code);

// Gives the code of a number that came from outside; kProtocol when there is none such, or it is one
// that no peer has reason to say: kWouldBlock.
Code code_from_wire(std::uint8_t number);

// Says whether something went well, and if not what was asked, what is allowed and what to do.
// A value: copying costs a reference count, success allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string text)
      : code_(code), text_(std::make_shared<const std::string>(std::move(text))) {}

  static Status ok() { return {}; }
  // Makes a kLimitExceeded status where memory ran out: takes none itself.
  static Status out_of_memory();
  // Makes a kSystem status with the text of an errno value.
  static Status system(int error_number, std::string_view doing);

  bool is_ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  std::string_view text() const { return text_ ? std::string_view(*text_) : std::string_view(); }
  // Gives "Name: text", for logs and test failures.
  std::string to_string() const;

 private:
  Code code_ = Code::kOk;
  std::shared_ptr<const std::string> text_;
};

// Holds a T, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit on purpose
  // Makes the T where it stays.
  template <typename... Args>
  explicit Result(std::in_place_t, Args&&... args)
      : value_(std::in_place, std::forward<Args>(args)...) {}

  bool is_ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  // Requires: is_ok().
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T take() { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace kvzc

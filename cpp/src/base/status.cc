#include "kvzc/status.h"

#include <cstring>

namespace kvzc {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "Ok";
#define KVZC_NAME(code, name, builtin) \
  case Code::code:                     \
    return #name;
      KVZC_STATUS_CODES(KVZC_NAME)
#undef KVZC_NAME
  }
  return "Unknown";
}

Code code_from_wire(std::uint8_t number) {
  if (number > static_cast<std::uint8_t>(Code::kSystem)) return Code::kProtocol;
  const auto code = static_cast<Code>(number);
  // Here it means "try again soon", and who is told so by a peer would try for ever.
  return code == Code::kWouldBlock ? Code::kProtocol : code;
}

namespace {
// Made when the library is loaded, and never gone: threads may outlive what the program unmakes.
const std::string& no_memory_text = *new std::string(
    "no memory is left for what the transfer needs; move fewer at once, or raise the process's limit");
}  // namespace

Status Status::out_of_memory() {
  Status out;
  out.code_ = Code::kLimitExceeded;
  // Shares nothing, and so needs no count.
  out.text_ = std::shared_ptr<const std::string>(std::shared_ptr<const std::string>(), &no_memory_text);
  return out;
}

Status Status::system(int error_number, std::string_view doing) {
  char buffer[128];
  // The GNU form returns the text, which need not lie in the buffer.
  const char* text = strerror_r(error_number, buffer, sizeof buffer);
  return Status(Code::kSystem,
                std::string(doing) + ": " + text + " (errno " + std::to_string(error_number) + ")");
}

std::string Status::to_string() const {
  std::string out(code_name(code_));
  if (text_) out.append(": ").append(*text_);
  return out;
}

}  // namespace kvzc

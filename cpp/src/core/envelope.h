// Envelope: what handles and catalogs have around their fields: what it is, version, length, checksum.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "kvzc/status.h"

namespace kvzc {

// Begins one; the fields follow. Requires: `magic` has four bytes.
ByteWriter begin_envelope(std::string_view magic);
// Ends it. Errors: kInvalidArgument when it is larger than 4 GiB; `what` names it: "handle".
Result<std::vector<std::byte>> seal_envelope(ByteWriter out, const char* what);
// Gives the fields. Errors: kBadHandle for anything truncated, damaged or from a later version.
Result<ByteReader> open_envelope(std::span<const std::byte> bytes, std::string_view magic,
                                 const char* what);
// The error for fields that make no sense, and for texts.
Status damaged(const char* what, const std::string& how);

}  // namespace kvzc

#include "core/envelope.h"

#include "fuzz/target.h"

namespace kvzc {

KVZC_FUZZ_TARGET(envelope)(fuzz::Bytes input) {
  Result<ByteReader> raw = open_envelope(input, "KVZH", "handle");
  if (raw.is_ok()) {
    // There is one way to put these fields into an envelope.
    ByteWriter again = begin_envelope("KVZH");
    again.raw(raw->raw(raw->left()));
    const Result<std::vector<std::byte>> sealed = seal_envelope(std::move(again), "handle");
    KVZC_FUZZ_CHECK(sealed.is_ok() && fuzz::is_equal(*sealed, input));
  }
  ByteWriter fields = begin_envelope("KVZH");
  fields.raw(input);
  const Result<std::vector<std::byte>> sealed = seal_envelope(std::move(fields), "handle");
  KVZC_FUZZ_CHECK(sealed.is_ok());
  Result<ByteReader> opened = open_envelope(*sealed, "KVZH", "handle");
  KVZC_FUZZ_CHECK(opened.is_ok() && fuzz::is_equal(opened->raw(opened->left()), input));
  KVZC_FUZZ_CHECK(!open_envelope(*sealed, "KVZK", "catalog").is_ok());
}

}  // namespace kvzc

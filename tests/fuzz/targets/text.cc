// Handles and catalogs as text.
#include "fuzz/target.h"
#include "kvzc/handle.h"

namespace kvzc {

KVZC_FUZZ_TARGET(text)(fuzz::Bytes input) {
  const std::string_view given = fuzz::as_text(input);
  for (const std::string& text : {std::string(given), "kvzc1." + std::string(given)}) {
    const Result<std::vector<std::byte>> bytes = handle_from_text(text);
    // There is one text for each handle.
    if (bytes.is_ok()) KVZC_FUZZ_CHECK(handle_to_text(*bytes) == text);
  }
  const Result<std::vector<std::byte>> back = handle_from_text(handle_to_text(input));
  KVZC_FUZZ_CHECK(back.is_ok() && fuzz::is_equal(*back, input));
}

}  // namespace kvzc

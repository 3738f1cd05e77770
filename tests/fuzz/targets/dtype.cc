#include "fuzz/target.h"
#include "kvzc/view.h"

namespace kvzc {

KVZC_FUZZ_TARGET(dtype)(fuzz::Bytes input) {
  // A copy of just these bytes: reading on would be seen.
  const std::vector<char> bytes(fuzz::as_text(input).begin(), fuzz::as_text(input).end());
  const std::string_view name(bytes.data(), bytes.size());
  if (const std::optional<DType> dtype = dtype_from_name(name)) {
    KVZC_FUZZ_CHECK(dtype_name(*dtype) == name);
    KVZC_FUZZ_CHECK(dtype_nbytes(*dtype) > 0);
  }
  for (const std::byte number : input) {
    const std::optional<DType> dtype = dtype_from_wire(std::to_integer<std::uint8_t>(number));
    if (!dtype) continue;
    KVZC_FUZZ_CHECK(dtype->number() == std::to_integer<std::uint8_t>(number));
    KVZC_FUZZ_CHECK(dtype_from_name(dtype_name(*dtype)) == dtype);
  }
}

}  // namespace kvzc

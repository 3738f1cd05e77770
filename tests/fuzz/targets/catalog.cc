// Catalogs whose envelopes, and those of the handles in them, are sound.
#include "kvzc/catalog.h"

#include "core/envelope.h"
#include "fuzz/target.h"

namespace kvzc {
namespace {

std::vector<std::byte> sealed(const char* magic, fuzz::Bytes body) {
  ByteWriter fields = begin_envelope(magic);
  fields.raw(body);
  Result<std::vector<std::byte>> out = seal_envelope(std::move(fields), "catalog");
  KVZC_FUZZ_CHECK(out.is_ok());
  return out.take();
}

}  // namespace

// The name; how many handles, and the fields of each; then the rest as it stands.
KVZC_FUZZ_TARGET(catalog)(fuzz::Bytes input) {
  (void)Catalog::decode(input);
  fuzz::Input in(input);
  ByteWriter body;
  body.text(fuzz::as_text(in.part()));
  const unsigned handles = in.u8() % 8;
  body.varint(handles);
  for (unsigned i = 0; i < handles; ++i) body.blob(sealed("KVZH", in.part()));
  body.raw(in.rest());
  const Result<Catalog> catalog = Catalog::decode(sealed("KVZK", body.view()));
  if (!catalog.is_ok()) return;

  const Result<std::vector<std::byte>> once = catalog->encode();
  KVZC_FUZZ_CHECK(once.is_ok());
  const Result<Catalog> same = Catalog::decode(*once);
  KVZC_FUZZ_CHECK(same.is_ok());
  const Result<std::vector<std::byte>> twice = same->encode();
  KVZC_FUZZ_CHECK(twice.is_ok() && *twice == *once);

  for (const Catalog::Range& range : catalog->ranges()) {
    const Result<RemoteView> all = catalog->resolve(range.address, range.nbytes);
    // Another range may begin within this one.
    const Result<RemoteView> first = catalog->resolve(range.address, 1);
    KVZC_FUZZ_CHECK(all.is_ok() && first.is_ok());
    for (const RemoteView& each : {*all, *first}) {
      const TensorView& tensor = each.view.tensors.front();
      KVZC_FUZZ_CHECK(check_within(tensor, each.handle->info.storage_nbytes[tensor.storage]).is_ok());
    }
    KVZC_FUZZ_CHECK(!catalog->resolve(range.address, UINT64_MAX).is_ok());
    (void)catalog->resolve(range.address - 1, 2);
  }
}

}  // namespace kvzc

// Handles, and what is done with one that was accepted.
#include "kvzc/handle.h"

#include "core/envelope.h"
#include "fuzz/target.h"

namespace kvzc {
namespace {

void check_within_storages(const RemoteView& remote) {
  for (const TensorView& tensor : remote.view.tensors) {
    const auto& storages = remote.handle->info.storage_nbytes;
    KVZC_FUZZ_CHECK(tensor.storage < storages.size());
    KVZC_FUZZ_CHECK(check_within(tensor, storages[tensor.storage]).is_ok());
    (void)tensor.nbytes();
    (void)tensor.describe();
  }
  (void)remote.view.nbytes();
}

// A list is looked at, and copied, entry by entry: only small numbers, as a caller's memory bounds.
Index draw_index(fuzz::Input& in) {
  const auto small = [&in] { return static_cast<std::int64_t>(static_cast<std::int8_t>(in.u8())); };
  const auto maybe = [&in](std::int64_t value) {
    return in.u8() % 3 == 0 ? std::nullopt : std::optional(value);
  };
  switch (in.u8() % 6) {
    case 0:
      return small();
    case 1:
      return Slice{maybe(small()), maybe(static_cast<std::int64_t>(in.u64())), maybe(small())};
    case 2:
      return Ellipsis{};
    case 3: {
      auto list = std::make_shared<std::vector<std::int64_t>>();
      for (int left = in.u8() % 8; left > 0; --left) list->push_back(small());
      return IndexList(std::move(list));
    }
    case 4:
      return std::string(fuzz::as_text(in.part()));
    default:
      return static_cast<std::int64_t>(in.u64());
  }
}

void use(const Result<RemoteView>& remote, fuzz::Input in) {
  if (!remote.is_ok()) return;
  check_within_storages(*remote);
  RemoteView at = *remote;
  for (int steps = 0; steps < 4 && !in.is_at_end(); ++steps) {
    Result<RemoteView> next = at;
    switch (in.u8() % 3) {
      case 0: {
        std::vector<Index> indices;
        for (int left = in.u8() % 4; left >= 0; --left) indices.push_back(draw_index(in));
        next = at.index(indices);
        break;
      }
      case 1: {
        std::vector<std::int64_t> dims;
        for (int left = in.u8() % 5; left > 0; --left) dims.push_back(in.u8() % 8 - 4);
        next = at.permute(dims);
        break;
      }
      default:
        next = at.view_as(dtype_from_wire(in.u8() % 25).value_or(DType(3, 4)));
    }
    if (!next.is_ok()) continue;
    at = next.take();
    check_within_storages(at);
  }
}

void check_says_itself_again(const HandleInfo& info) {
  const Result<std::vector<std::byte>> once = encode_handle(info);
  KVZC_FUZZ_CHECK(once.is_ok());
  const Result<HandleInfo> same = decode_handle(*once);
  KVZC_FUZZ_CHECK(same.is_ok());
  const Result<std::vector<std::byte>> twice = encode_handle(*same);
  KVZC_FUZZ_CHECK(twice.is_ok() && *twice == *once);
}

}  // namespace

// As it is, and as the fields of a handle whose envelope is sound, behind what is done with it.
KVZC_FUZZ_TARGET(handle)(fuzz::Bytes input) {
  if (const Result<HandleInfo> info = decode_handle(input); info.is_ok()) {
    check_says_itself_again(*info);
  }
  fuzz::Input in(input);
  const fuzz::Bytes steps = in.part();
  ByteWriter fields = begin_envelope("KVZH");
  fields.raw(in.rest());
  const Result<std::vector<std::byte>> sealed = seal_envelope(std::move(fields), "handle");
  KVZC_FUZZ_CHECK(sealed.is_ok());
  const Result<RemoteView> remote = RemoteView::from_bytes(*sealed);
  if (remote.is_ok()) check_says_itself_again(remote->handle->info);
  use(remote, fuzz::Input(steps));
}

}  // namespace kvzc

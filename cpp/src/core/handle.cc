#include "kvzc/handle.h"

#include <algorithm>

#include "base/utf8.h"
#include "core/envelope.h"

namespace kvzc {
namespace {

constexpr std::string_view kMagic = "KVZH";
constexpr std::string_view kTextPrefix = "kvzc1.";
constexpr std::size_t kMaxNameBytes = 255;
constexpr std::size_t kMaxAxes = 32;

// What tensors of a group share is written once: dtype and axes.
void encode_layout(ByteWriter& out, const TensorView& tensor) {
  out.u8(tensor.dtype.number());
  if (tensor.dtype.is_record()) {
    out.varint(tensor.dtype.nbytes());
    out.u64(tensor.dtype.fingerprint());
  }
  out.u8(static_cast<std::uint8_t>(tensor.axes.size()));
  for (const Axis& axis : tensor.axes) {
    out.u8(axis.list ? 1 : 0);
    out.varint(static_cast<std::uint64_t>(axis.size));
    out.signed_varint(axis.stride);
    if (!axis.list) continue;
    std::int64_t last = 0;
    for (const std::int64_t id : *axis.list) {
      out.signed_varint(id - last);
      last = id;
    }
  }
}

bool decode_layout(ByteReader& in, TensorView* tensor) {
  const std::uint8_t number = in.u8();
  if (number == DType::kRecord) {
    const std::uint64_t nbytes = in.varint();
    const std::uint64_t fingerprint = in.u64();
    if (nbytes == 0 || nbytes > UINT32_MAX) return false;
    tensor->dtype = DType(static_cast<std::uint32_t>(nbytes), fingerprint);
  } else {
    const auto dtype = dtype_from_wire(number);
    if (!dtype) return false;
    tensor->dtype = *dtype;
  }
  const std::size_t axis_count = in.u8();
  if (axis_count > kMaxAxes) return false;
  for (std::size_t i = 0; i < axis_count; ++i) {
    Axis axis;
    const std::uint8_t kind = in.u8();
    const std::uint64_t size = in.varint();
    axis.stride = in.signed_varint();
    if (!in.is_good() || kind > 1 || size > INT64_MAX) return false;
    axis.size = static_cast<std::int64_t>(size);
    if (kind == 1) {
      if (size > in.left()) return false;
      auto list = std::make_shared<std::vector<std::int64_t>>();
      list->reserve(size);
      std::uint64_t at = 0;  // Unsigned, so that damaged differences wrap rather than trap.
      for (std::uint64_t id = 0; id < size; ++id) {
        at += static_cast<std::uint64_t>(in.signed_varint());
        if (at > INT64_MAX) return false;
        list->push_back(static_cast<std::int64_t>(at));
      }
      axis.list = std::move(list);
    }
    tensor->axes.push_back(std::move(axis));
  }
  return in.is_good();
}

Status damaged(const std::string& how) { return kvzc::damaged("handle", how); }

}  // namespace

Result<std::vector<std::byte>> encode_handle(const HandleInfo& info) {
  ByteWriter out = begin_envelope(kMagic);
  out.raw(info.incarnation);
  out.u64(info.grant_id);
  out.u8(static_cast<std::uint8_t>(info.access));
  out.u8(info.device_kind);
  out.raw(info.key);
  out.text(info.engine_name);
  out.varint(info.addresses.size());
  for (const EngineAddress& address : info.addresses) {
    out.u8(static_cast<std::uint8_t>(address.kind));
    out.text(address.text);
  }
  out.varint(info.storage_nbytes.size());
  for (const std::uint64_t nbytes : info.storage_nbytes) out.varint(nbytes);

  std::vector<std::vector<std::byte>> layouts;
  std::vector<std::size_t> layout_of;
  for (const TensorView& tensor : info.view.tensors) {
    if (tensor.axes.size() > kMaxAxes) {
      return Status(Code::kInvalidArgument, "a handle holds at most 32 axes per tensor");
    }
    ByteWriter layout;
    encode_layout(layout, tensor);
    std::vector<std::byte> bytes = layout.take();
    const auto at = std::find(layouts.begin(), layouts.end(), bytes);
    layout_of.push_back(static_cast<std::size_t>(at - layouts.begin()));
    if (at == layouts.end()) layouts.push_back(std::move(bytes));
  }
  out.varint(layouts.size());
  for (const auto& layout : layouts) out.raw(layout);
  out.u8(info.view.is_group() ? 1 : 0);
  out.varint(info.view.tensors.size());
  std::string_view last_name;
  for (std::size_t i = 0; i < info.view.tensors.size(); ++i) {
    const TensorView& tensor = info.view.tensors[i];
    out.varint(layout_of[i]);
    out.varint(tensor.storage);
    out.varint(static_cast<std::uint64_t>(tensor.offset));
    if (!info.view.is_group()) continue;
    // Names of layers mostly differ in a number: only what is new is written.
    const std::string_view name = info.view.names[i];
    if (name.size() > kMaxNameBytes) {
      return Status(Code::kInvalidArgument,
                    "a tensor's name has " + std::to_string(name.size()) + " bytes; 255 fit");
    }
    if (!is_utf8(name)) return Status(Code::kInvalidArgument, "a tensor's name is not UTF-8");
    const auto [old_end, new_end] =
        std::mismatch(last_name.begin(), last_name.end(), name.begin(), name.end());
    const auto shared = static_cast<std::size_t>(new_end - name.begin());
    out.varint(shared);
    out.text(name.substr(shared));
    last_name = name;
  }
  return seal_envelope(std::move(out), "handle");
}

Result<HandleInfo> decode_handle(std::span<const std::byte> bytes) {
  Result<ByteReader> fields = open_envelope(bytes, kMagic, "handle");
  if (!fields.is_ok()) return fields.status();
  ByteReader& in = *fields;
  HandleInfo out;
  out.incarnation = in.array<16>();
  out.grant_id = in.u64();
  const std::uint8_t access = in.u8();
  out.device_kind = in.u8();
  out.key = in.array<32>();
  out.engine_name = in.text();
  if (access < 1 || access > 3) return damaged("its access is unknown");
  if (!is_utf8(out.engine_name)) return damaged("a name is not UTF-8");
  out.access = static_cast<Access>(access);
  for (std::size_t left = in.count(2); left > 0; --left) {
    EngineAddress address;
    address.kind = static_cast<AddressKind>(in.u8());
    address.text = in.text();
    out.addresses.push_back(std::move(address));
  }
  for (std::size_t left = in.count(); left > 0; --left) {
    out.storage_nbytes.push_back(in.varint());
    if (out.storage_nbytes.back() > INT64_MAX) return damaged("a storage is larger than any memory");
  }
  std::vector<TensorView> layouts;
  std::vector<Extent> extents;  // Once per layout: a forged handle may use one very often.
  for (std::size_t left = in.count(2); left > 0; --left) {
    TensorView layout;
    if (!decode_layout(in, &layout)) return damaged("a layout is unreadable");
    const Result<Extent> extent = extent_of(layout);
    if (!extent.is_ok()) return damaged("a layout is larger than any memory");
    layouts.push_back(std::move(layout));
    extents.push_back(*extent);
  }
  const bool is_group = in.u8() != 0;
  std::string last_name;
  for (std::size_t left = in.count(3); left > 0; --left) {
    const std::uint64_t layout = in.varint();
    const std::uint64_t storage = in.varint();
    const std::uint64_t offset = in.varint();
    if (!in.is_good() || layout >= layouts.size() || storage >= out.storage_nbytes.size() ||
        offset > INT64_MAX) {
      return damaged("a tensor is unreadable");
    }
    TensorView tensor = layouts[layout];
    tensor.storage = static_cast<std::uint32_t>(storage);
    tensor.offset = static_cast<std::int64_t>(offset);
    if (!check_within(tensor, extents[layout], out.storage_nbytes[storage]).is_ok()) {
      return damaged("a tensor reaches beyond its storage");
    }
    out.view.tensors.push_back(std::move(tensor));
    if (!is_group) continue;
    const std::uint64_t shared = in.varint();
    if (shared > last_name.size()) return damaged("a name is unreadable");
    last_name = last_name.substr(0, shared) + in.text();
    if (last_name.size() > kMaxNameBytes) return damaged("a name is too long");
    if (!is_utf8(last_name)) return damaged("a name is not UTF-8");
    out.view.names.push_back(last_name);
  }
  if (!in.is_good() || !in.is_at_end()) return damaged("its parts do not add up");
  if (out.view.tensors.empty() || (!is_group && out.view.tensors.size() != 1)) {
    return damaged("it has no tensor");
  }
  return out;
}

namespace {
constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
}

std::string handle_to_text(std::span<const std::byte> bytes) {
  return bytes_to_text(kTextPrefix, bytes);
}

Result<std::vector<std::byte>> handle_from_text(std::string_view text) {
  return bytes_from_text(kTextPrefix, text);
}

std::string bytes_to_text(std::string_view prefix, std::span<const std::byte> bytes) {
  std::string out(prefix);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    const std::size_t have = std::min<std::size_t>(3, bytes.size() - i);
    for (std::size_t j = 0; j < 3; ++j) {
      group = (group << 8) | (j < have ? std::to_integer<std::uint32_t>(bytes[i + j]) : 0);
    }
    for (std::size_t j = 0; j < have + 1; ++j) out += kDigits[(group >> (18 - 6 * j)) & 63];
  }
  return out;
}

Result<std::vector<std::byte>> bytes_from_text(std::string_view prefix, std::string_view text) {
  if (!text.starts_with(prefix)) {
    return damaged("the text does not begin with '" + std::string(prefix) + "'");
  }
  text.remove_prefix(prefix.size());
  if (text.size() % 4 == 1) return damaged("the text is truncated");
  std::vector<std::byte> out;
  out.reserve(text.size() * 3 / 4);
  std::uint32_t group = 0;
  int bits = 0;
  for (const char c : text) {
    const std::size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos)
      return damaged("the text has a character that no handle has");
    group = (group << 6) | static_cast<std::uint32_t>(digit);
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      out.push_back(static_cast<std::byte>(group >> bits));
    }
  }
  // Left-over bits must be zero, so that every handle has one text only.
  if ((group & ((1u << bits) - 1)) != 0) return damaged("the text's end is damaged");
  return out;
}

Result<RemoteView> RemoteView::from_bytes(std::span<const std::byte> bytes) {
  Result<HandleInfo> info = decode_handle(bytes);
  if (!info.is_ok()) return info.status();
  RemoteView out;
  out.view = info->view;
  out.handle = std::make_shared<Shared>();
  out.handle->info = info.take();
  return out;
}

Result<RemoteView> RemoteView::from_text(std::string_view text) {
  Result<std::vector<std::byte>> bytes = handle_from_text(text);
  if (!bytes.is_ok()) return bytes.status();
  return from_bytes(*bytes);
}

namespace {

Result<RemoteView> of_same_grant(const RemoteView& view, Result<View> changed) {
  if (!changed.is_ok()) return changed.status();
  return RemoteView{view.handle, changed.take()};
}

}  // namespace

Result<RemoteView> RemoteView::index(std::span<const Index> indices) const {
  return of_same_grant(*this, index_view(view, indices));
}

Result<RemoteView> RemoteView::permute(std::span<const std::int64_t> dims) const {
  return of_same_grant(*this, permute_view(view, dims));
}

Result<RemoteView> RemoteView::view_as(DType dtype) const {
  return of_same_grant(*this, kvzc::view_as(view, dtype));
}

RemoteView::Shared::~Shared() {
  for (const Bound* each = bound.load(); each != nullptr;) delete std::exchange(each, each->next);
}

void* RemoteView::Shared::find(const Incarnation& engine) const {
  const Bound* each = bound.load(std::memory_order_acquire);
  while (each != nullptr && std::memcmp(each->engine.data(), engine.data(), sizeof engine) != 0) {
    each = each->next;
  }
  return each == nullptr ? nullptr : each->binding.get();
}

void* RemoteView::Shared::keep(const Incarnation& engine, std::shared_ptr<void> binding) {
  auto* const mine = new Bound{engine, std::move(binding), bound.load(std::memory_order_acquire)};
  do {
    // Another thread may have been faster.
    if (void* const kept = find(engine)) {
      delete mine;
      return kept;
    }
  } while (!bound.compare_exchange_weak(mine->next, mine, std::memory_order_acq_rel));
  return mine->binding.get();
}

std::string incarnation_text(const Incarnation& incarnation) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const std::byte b : incarnation) {
    out += kHex[std::to_integer<std::size_t>(b >> 4)];
    out += kHex[std::to_integer<std::size_t>(b & std::byte{15})];
  }
  return out;
}

}  // namespace kvzc

// Writes what the corpus began with: an input for each target that means something. `make fuzz-corpus`
// adds what the fuzzers have found since.
#include <filesystem>
#include <fstream>
#include <initializer_list>

#include "core/envelope.h"
#include "core/wire.h"
#include "fuzz/target.h"
#include "kvzc/handle.h"

namespace kvzc {
namespace {

using Strings = std::vector<std::string>;

std::string bytes(std::initializer_list<unsigned> values) {
  std::string out;
  for (const unsigned value : values) out += static_cast<char>(value);
  return out;
}
std::string text_of(fuzz::Bytes all) { return std::string(fuzz::as_text(all)); }
// As fuzz::Input::part() takes it; longer ones are cut.
std::string part(std::string_view all) {
  all = all.substr(0, 255);
  return static_cast<char>(all.size()) + std::string(all);
}

// --- Handles ---

TensorView tensor(DType dtype, const std::vector<std::int64_t>& shape) {
  TensorView out;
  out.dtype = dtype;
  std::int64_t stride = dtype.nbytes();
  for (std::size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
    out.axes.insert(out.axes.begin(), Axis{shape[i], stride, nullptr});
  }
  return out;
}

HandleInfo info_of(View view) {
  HandleInfo out;
  out.engine_name = "decode-7";
  out.addresses.push_back({AddressKind::kUnix, "kvzc/0/decode-7/01234567"});
  out.addresses.push_back({AddressKind::kTcp, "[2001:db8::1]:7000"});
  out.grant_id = 0x123456789abcdef0;
  out.storage_nbytes = {1u << 20, 1u << 20};
  out.view = std::move(view);
  return out;
}

Strings handle_bodies() {
  std::vector<HandleInfo> all;
  all.push_back(info_of({{tensor(DType::kBfloat16, {8, 16, 128})}, {}}));
  TensorView list = tensor(DType::kFloat32, {100, 8, 4});
  list.axes[0].list = std::make_shared<const std::vector<std::int64_t>>(
      std::vector<std::int64_t>{99, 0, 5, 6, 7, 7});
  list.axes[0].size = 6;
  list.axes[2].stride = -4;
  list.offset = 12;
  all.push_back(info_of({{list}, {}}));
  all.push_back(info_of({{tensor(DType(24, 0xfedcba9876543210), {3, 0, 2})}, {}}));
  View group;
  for (int layer = 0; layer < 3; ++layer) {
    group.tensors.push_back(tensor(DType::kFloat16, {4, 8}));
    group.tensors.back().offset = 64 * layer;
    group.tensors.back().storage = static_cast<std::uint32_t>(layer % 2);
    group.names.push_back("layer." + std::to_string(layer) + ".k");
  }
  all.push_back(info_of(group));
  all.push_back(info_of({{tensor(DType::kUint8, {})}, {}}));
  Strings out;
  for (const HandleInfo& info : all) {
    const std::string whole = text_of(*encode_handle(info));
    out.push_back(whole.substr(12, whole.size() - 20));
  }
  return out;
}

Strings handles() {
  Strings out;
  // An index of each kind; turned about; as bytes.
  const std::string steps = bytes({0, 3, 0, 1, 1, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1, 1, 3, 2, 0, 2, 2, 0,
                                   4, 7}) + "layer.0" + bytes({1, 3, 2, 1, 0, 2, 0, 1, 2, 0xff, 0});
  for (const std::string& body : handle_bodies()) {
    out.push_back(part("") + body);
    out.push_back(part(steps) + body);
  }
  for (const std::string& body : handle_bodies()) {
    ByteWriter fields = begin_envelope("KVZH");
    fields.raw(std::as_bytes(std::span(body)));
    out.push_back(text_of(*seal_envelope(std::move(fields), "handle")));
  }
  return out;
}

Strings catalogs() {
  const Strings bodies = handle_bodies();
  const auto range = [](std::uint64_t address, unsigned nbytes, unsigned region, unsigned offset) {
    ByteWriter out;
    out.u64(address);
    out.varint(nbytes);
    out.varint(region);
    out.varint(0);
    out.varint(offset);
    return text_of(out.view());
  };
  Strings out;
  out.push_back(part("decode-7") + bytes({0, 0}));
  out.push_back(part("decode-7") + bytes({2}) + part(bodies[0]) + part(bodies[3]) + bytes({3}) +
                range(0x10000, 0x1000, 0, 0) + range(0x10800, 0x1000, 1, 64) +
                range(0x7fffffff0000, 0x100000, 1, 0));
  out.push_back(part("") + bytes({1}) + part(bodies[4]) + bytes({1}) + range(UINT64_MAX - 16, 16, 0, 0));
  return out;
}

Strings texts() {
  Strings out{"", "kvzc1.", "AA", "AAAA", "-_-_"};
  for (const std::string& handle : handles()) {
    out.push_back(handle_to_text(std::as_bytes(std::span(handle))).substr(6));
  }
  return out;
}

Strings envelopes() {
  Strings out{"", "KVZH"};
  for (const std::string& handle : handles()) out.push_back(handle);
  return out;
}

Strings dtypes() {
  Strings out{"record24-0123456789abcdef", "record4294967295-ffffffffffffffff", "record0-0000000000000000",
              "record24", "record24-", "record1-00000000000000001"};
  for (std::uint8_t number = 0; const auto dtype = dtype_from_wire(number); ++number) {
    out.push_back(dtype_name(*dtype));
    out.push_back(bytes({number}));
  }
  return out;
}

Strings addresses() {
  return {"10.0.0.1:7000", "[fd00::1]:7000", "0.0.0.0:0", "[::]:65535", "127.1:1", "[fe80::1%lo]:1",
          "0x7f000001:80", "[::ffff:10.0.0.1]:7", ":1", "[]:1", "a:b:1", "10.0.0.1:65536", "10.0.0.1:"};
}

// --- The control connection ---

template <std::size_t N>
std::array<std::byte, N> counted_up(unsigned from) {
  std::array<std::byte, N> out;
  for (std::size_t i = 0; i < N; ++i) out[i] = static_cast<std::byte>(from + i);
  return out;
}

Strings messages() {
  using namespace wire;
  const std::vector<Offer> offers{{"shm", {std::byte{1}, std::byte{2}}, 4}, {"rdma", {}, 0}};
  Strings out;
  const auto add = [&](const std::vector<std::byte>& message) { out.push_back(text_of(message)); };
  add(encode(Hello{1, 7, counted_up<16>(1), counted_up<16>(101), counted_up<32>(50), 77, "prefill-3"}));
  add(encode(Challenge{1, counted_up<32>(9), counted_up<32>(1), "decode-7"}));
  add(encode(Proof{counted_up<32>(4), offers}));
  add(encode(Welcome{offers}));
  add(encode(Type::kRefuse, Refuse{Code::kRevoked, "the grant was revoked"}));
  add(encode(Type::kBye, Refuse{Code::kClosed, ""}));
  add(encode(Attach{7, 78, counted_up<32>(5)}));
  add(encode(Storage{42, 1ull << 40, {{"shm", Code::kOk, "", {std::byte{1}}, 1},
                                      {"rdma", Code::kTransportUnavailable, "no device", {}, 0}}}));
  add(encode(Attached{7, Code::kOk, "", counted_up<32>(3), 11, 2, {1, 2, 1ull << 63}}));
  add(encode(Release{42}));
  add(encode_kick());
  return out;
}

Strings wires() {
  Strings out;
  for (const std::string& message : messages()) {
    out.push_back(message);
    out.push_back(static_cast<char>(message[0] - 1) + message.substr(8));
  }
  return out;
}

Strings streams() {
  const Strings all = messages();
  std::string together, bytewise;
  for (const std::string& message : all) together += message;
  for (const char c : all[0]) bytewise += part(std::string(1, c));
  Strings out{bytewise, part(together) + part(together.substr(255))};
  for (const std::string& message : all) out.push_back(part(message.substr(0, 5)) + part(message.substr(5)));
  out.push_back(part(bytes({1, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f})));
  out.push_back(part(bytes({1, 0, 0, 0, 7, 0, 0, 0})));
  out.push_back(part(bytes({10, 0, 0, 0, 8, 0, 0, 0, 10, 0, 0, 0, 9, 0, 0, 0, 1})));
  return out;
}

// The first byte says which side it is, and how far all goes well: control.cc has the steps.
Strings controls() {
  Strings out;
  for (unsigned side = 0; side < 4; ++side) {
    for (unsigned steps = 0; steps < 4; ++steps) {
      const unsigned how = 0x10 | steps << 2 | side;
      const std::string begin = bytes({how}) + (side < 2 ? bytes({0, 0}) : "");
      out.push_back(begin);
      out.push_back(begin + bytes({2, 3, 4, 1}));
      out.push_back(begin + bytes({4, 1, 15, 8, 17, 0, 4, 2, 8}));
      out.push_back(begin + bytes({13, 3}) + "tag" + bytes({8, 12, 0x40, 0x10, 2, 0xff, 0xff, 8}));
      out.push_back(begin + bytes({12, 0, 0, 4, 1, 0, 0, 0, 17, 1}));
      out.push_back(begin + bytes({5, 1, 0, 7, 6, 1, 0, 1, 7, 1, 6, 2, 13, 1}));
      out.push_back(begin + bytes({14, 2, 4, 1, 4, 1, 16, 3, 0, 4, 8, 3, 4, 2}));
      out.push_back(begin + bytes({9, 13, 0, 4}) + "bye." + bytes({2}));
      out.push_back(begin + bytes({18, 3}) + bytes({2, 0}) + part(messages()[2]) + bytes({10, 11}));
      out.push_back(begin + bytes({1, 9}) + part("damaged") + bytes({19, 0}));
    }
  }
  return out;
}

// --- shm ---

Strings shm_offers() {
  ByteWriter offer;
  offer.u32(4096);
  offer.u32(64);
  offer.u32(8);
  offer.u64(0);
  const std::string terms = part(text_of(offer.view()));
  Strings out;
  out.push_back(bytes({4, 1, 4, 0, 1, 2, 3}) + terms + bytes({3, 0, 2, 0, 0, 0, 0, 0, 0, 0}));
  out.push_back(bytes({0, 1, 4, 7, 7, 9, 7}) + terms);
  out.push_back(bytes({0, 1, 4, 4, 5, 6, 8}) + terms);
  out.push_back(bytes({0, 0, 1, 0, 16, 1, 7}) + part(bytes({1})));
  out.push_back(bytes({4, 0, 1, 0, 16, 0}) + part(bytes({0}) + std::string(32, '\1')));
  return out;
}

Strings shm_rings() {
  const std::string record = bytes({3, 0, 0, 0, 0, 0, 0, 0}) + "tag" + std::string(5, '\0');
  Strings out;
  // Two tags, taken, and one across the ring's end.
  out.push_back(bytes({0, 0, 0, 0}) + part(record + record) + bytes({1, 32, 0, 5, 6, 6, 5}));
  out.push_back(bytes({0, 2, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 5}));
  out.push_back(bytes({1, 3, 0, 1, 0, 0, 0x80, 1, 0, 0, 0, 8, 0, 0, 7, 3, 0, 7, 240, 1, 9}));
  out.push_back(bytes({0, 4}) + std::string(16, '\xff') + bytes({1, 1, 7, 9, 0, 9}));
  return out;
}

// --- rdma ---

Strings rdma_offers() {
  const auto offer = [](unsigned rails, std::string_view gid) {
    ByteWriter out;
    out.u8(1);
    out.text("another host");
    out.u32(16);
    out.u8(static_cast<std::uint8_t>(rails));
    for (unsigned i = 0; i < rails; ++i) {
      out.u32(17 + i);
      out.u32(0x123456);
      out.u16(0);
      for (const unsigned each : {3u, 16u, 1u, 1u}) out.u8(static_cast<std::uint8_t>(each));
      out.u64(0x1000);
      out.u32(99);
      out.varint(1);
      out.u8(1);
      out.raw(std::as_bytes(std::span(gid)));
    }
    return text_of(out.view());
  };
  const std::string here = std::string(10, '\0') + bytes({0xff, 0xff, 10, 0, 0});
  const auto road = [](std::uint64_t part_bytes, unsigned rails, unsigned keys) {
    ByteWriter out;
    out.u64(0x7000);
    out.raw(counted_up<16>(1));
    out.u8(static_cast<std::uint8_t>(rails));
    for (unsigned i = 0; i < rails; ++i) {
      out.u64(part_bytes);
      out.varint(keys);
      for (unsigned key = 0; key < keys; ++key) out.u32(key);
    }
    return text_of(out.view());
  };
  Strings out;
  for (const unsigned rails : {1u, 2u, 3u}) {
    out.push_back(bytes({1}) + offer(rails, here + '\2'));
    out.push_back(bytes({1}) + offer(rails, here + '\1'));
  }
  out.push_back(bytes({1}) + offer(1, std::string(16, '\xfe')));
  out.push_back(bytes({2, 0, 16}) + road(4096, 2, 1));
  out.push_back(bytes({2, 0, 16}) + road(1024, 1, 4));
  out.push_back(bytes({0, 0, 0, 0, 0, 0, 0, 0, 0x80}) + road(1ull << 62, 2, 2));
  return out;
}

// Type, step, consumed, slots, body.
Strings rdma_floods() {
  Strings out;
  for (unsigned type = 1; type <= 7; ++type) out.push_back(bytes({type, 0, 0, 0, 24}));
  out.push_back(bytes({2, 21, 0, 0, 0}));
  out.push_back(bytes({2, 0, 9, 0, 0}));
  out.push_back(bytes({4, 0, 0, 15, 24}));
  out.push_back(bytes({4, 4, 0, 0, 8}));
  return out;
}

// The steps are in rdma_message.cc.
Strings rdma_messages() {
  const std::string post = bytes({5, 1, 1, 2, 3, 0, 0, 4, 8, 0, 2, 9, 0, 1});
  const std::string striped = bytes({6, 0, 2, 0, 7, 0, 0xff, 0xf, 0, 0xff, 0xf});
  const auto message = [](unsigned type, unsigned rail, std::string_view body) {
    return bytes({1, type, 0, rail, 1, 0}) + part(body) + bytes({rail});
  };
  const std::string fence = bytes({7, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0});
  Strings out{post, striped};
  out.push_back(post + bytes({3, 0, 9, 7}) + message(2, 0, "") + message(1, 0, "tag") + bytes({7, 8}));
  out.push_back(striped + post + message(4, 1, fence) + bytes({3, 0, 1, 3, 1, 9, 10, 1, 2}) +
                message(5, 0, bytes({1, 0, 0, 0, 0, 0, 0, 0})) + bytes({10, 1, 2}));
  out.push_back(striped + message(6, 1, "") + message(7, 1, "") + bytes({3, 0, 200}) + post);
  out.push_back(striped + bytes({4, 1, 3, 0, 9}) + message(7, 1, "") + bytes({3, 0, 99, 4, 0}));
  out.push_back(post + bytes({11, 0, 12, 1, 1, 12, 0, 0, 2}) + post + striped + bytes({13}));
  out.push_back(bytes({9, 0, 9, 0, 9, 1}) + message(3, 0, "") + message(0, 0, "") + bytes({0, 5}) + "short");
  return out;
}

void write(const std::filesystem::path& corpus, const char* target, const Strings& inputs) {
  std::filesystem::create_directories(corpus / target);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::ofstream(corpus / target / ("seed-" + std::to_string(i)), std::ios::binary) << inputs[i];
  }
}

}  // namespace
}  // namespace kvzc

int main(int argc, char** argv) {
  using namespace kvzc;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS\n", argv[0]);
    return 2;
  }
  write(argv[1], "envelope", envelopes());
  write(argv[1], "text", texts());
  write(argv[1], "handle", handles());
  write(argv[1], "catalog", catalogs());
  write(argv[1], "dtype", dtypes());
  write(argv[1], "address", addresses());
  write(argv[1], "wire", wires());
  write(argv[1], "stream", streams());
  write(argv[1], "control", controls());
  write(argv[1], "shm_offer", shm_offers());
  write(argv[1], "shm_ring", shm_rings());
  write(argv[1], "rdma_offer", rdma_offers());
  write(argv[1], "rdma_message", rdma_messages());
  write(argv[1], "rdma_flood", rdma_floods());
  return 0;
}

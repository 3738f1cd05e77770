#include "cpp/rdma/rig.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "cpp/harness.h"

namespace kvzc::bench {
namespace {

constexpr std::uint64_t kPingBytes = 8;
constexpr std::string_view kPing = "ping";
constexpr std::int64_t kPatienceNs = 30'000'000'000;

enum class Ask : std::uint64_t { kVerify, kEchoKvzc, kEchoRaw };

struct Request {
  Ask ask;
  std::uint64_t seed;
  std::uint64_t count;
};

bool are_right(const Side& side, std::uint64_t seed, const std::vector<RawPair::Piece>& pieces) {
  std::vector<std::byte> source(side.half_bytes);
  fill_random_bytes(source.data(), source.size(), seed);
  for (const RawPair::Piece& piece : pieces) {
    for (const std::uint64_t half : {std::uint64_t{0}, side.half_bytes}) {
      if (std::memcmp(side.memory->data() + half + piece.target, source.data() + piece.source,
                      piece.nbytes) != 0) {
        return false;
      }
    }
  }
  return true;
}

[[noreturn]] void own(int socket, const std::string& device, std::uint64_t half_bytes) {
  {
    Side side(device, half_bytes);
    side.meet(socket);
    Request request;
    while (read_all(socket, &request, sizeof request)) {
      if (request.ask == Ask::kVerify) {
        std::vector<RawPair::Piece> pieces(request.count);
        if (!read_all(socket, pieces.data(), pieces.size() * sizeof(RawPair::Piece))) break;
        const bool is_right = are_right(side, request.seed, pieces);
        write_all(socket, &is_right, 1);
        continue;
      }
      for (std::uint64_t i = 0; i < request.count; ++i) {
        if (request.ask == Ask::kEchoKvzc) {
          side.kvzc_await();
          side.kvzc_ping();
        } else {
          side.raw_await();
          side.raw_ping();
        }
      }
    }
  }
  std::exit(0);
}

}  // namespace

Side::Side(const std::string& device, std::uint64_t half) : half_bytes(half) {
  EngineOptions options;
  options.transports = {"rdma"};
  options.rdma.devices = {device};
  engine = take(Engine::create(options));
  memory = take(engine->allocator().allocate(2 * half_bytes));
  std::memset(memory->data(), 0, memory->nbytes());
  const TensorSpec spec = all({static_cast<std::int64_t>(memory->nbytes())});
  region = take(engine->register_memory({&spec, 1}));
  source = take(region.view());
  raw.emplace(device, std::span(memory->data(), memory->nbytes()));
}

TensorSpec Side::all(std::vector<std::int64_t> shape) const {
  TensorSpec spec;
  spec.shape = std::move(shape);
  spec.strides_bytes.resize(spec.shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = spec.shape.size(); i-- > 0; stride *= spec.shape[i]) {
    spec.strides_bytes[i] = stride;
  }
  spec.data = spec.storage_data = memory->data();
  spec.storage_nbytes = memory->nbytes();
  spec.keep_alive = memory;
  return spec;
}

void Side::meet(int socket) {
  const std::string text = handle_to_text(take(encode_handle(take(region.handle()))));
  const std::uint64_t length = text.size();
  const RawPair::Address own_address = raw->address();
  write_all(socket, &length, sizeof length);
  write_all(socket, text.data(), length);
  write_all(socket, &own_address, sizeof own_address);
  std::uint64_t their_length = 0;
  RawPair::Address their_address;
  if (!read_all(socket, &their_length, sizeof their_length)) die("the other process did not start");
  std::string their_text(their_length, '\0');
  if (!read_all(socket, their_text.data(), their_length) ||
      !read_all(socket, &their_address, sizeof their_address)) {
    die("the other process did not start");
  }
  raw->connect(their_address);
  target = take(RemoteView::from_text(their_text));
  const Transfer connected = take(engine->connect(target));
  if (!connected.wait(now_ns() + kPatienceNs).is_ok() || !connected.status().is_ok()) {
    die("cannot connect");
  }
  const Index first = Slice{0, static_cast<std::int64_t>(kPingBytes), std::nullopt};
  ping_source_ = take(source.index({&first, 1}));
  ping_target_ = take(target.index({&first, 1}));
  // Both are ready.
  char is_ready = 1;
  write_all(socket, &is_ready, 1);
  if (!read_all(socket, &is_ready, 1)) die("the other process is gone");
}

void Side::kvzc_ping() {
  TransferOptions options;
  options.notify = kPing;
  const TransferItem item{&ping_source_, &ping_target_};
  ping_ = take(engine->try_put({&item, 1}, options));
}

void Side::kvzc_await() {
  const std::vector<Arrival> arrived =
      take(engine->wait_arrivals(kPing, 1, nullptr, now_ns() + kPatienceNs));
  if (arrived[0].code != Code::kOk) die("a ping failed");
}

void Side::raw_ping() { raw->write_and_send({half_bytes, half_bytes, kPingBytes}); }
void Side::raw_await() { raw->receive(); }

Rig::Rig(const std::string& device, std::uint64_t half_bytes) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) die("socketpair");
  std::fflush(nullptr);
  child_ = fork();  // Before this process has an engine.
  if (child_ == 0) {
    close(pair[0]);
    own(pair[1], device, half_bytes);
  }
  close(pair[1]);
  socket_ = pair[0];
  here_.emplace(device, half_bytes);
  here_->meet(socket_);
}

Rig::~Rig() {
  here_.reset();
  close(socket_);
  waitpid(child_, nullptr, 0);
}

void Rig::refill() {
  std::byte* const data = here_->memory->data();
  fill_random_bytes(data, here_->half_bytes, ++seed_);
  std::memcpy(data + here_->half_bytes, data, kPingBytes);  // What raw_ping() sends.
}

void Rig::verify(const std::vector<RawPair::Piece>& pieces) {
  const Request request{Ask::kVerify, seed_, pieces.size()};
  write_all(socket_, &request, sizeof request);
  write_all(socket_, pieces.data(), pieces.size() * sizeof(RawPair::Piece));
  bool is_right = false;
  if (!read_all(socket_, &is_right, 1)) die("the owner is gone");
  if (!is_right) die("the owner's bytes are not those that were put");
}

void Rig::echo_kvzc(std::uint64_t count) {
  const Request request{Ask::kEchoKvzc, 0, count};
  write_all(socket_, &request, sizeof request);
}

void Rig::echo_raw(std::uint64_t count) {
  const Request request{Ask::kEchoRaw, 0, count};
  write_all(socket_, &request, sizeof request);
}

}  // namespace kvzc::bench

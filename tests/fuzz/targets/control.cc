// The state machine of the control connection: engines that a peer tells whatever it likes, in any
// order, before and after it has proved itself. They must not crash, not keep anybody waiting, and
// serve others as before.
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <optional>

#include "base/clock.h"
#include "base/tcp_socket.h"
#include "core/control_socket.h"
#include "core/wire.h"
#include "fuzz/shm_host.h"
#include "kvzc/engine.h"

namespace kvzc {
namespace {

using fuzz::Host;
using fuzz::Input;

constexpr std::int64_t kLimitNs = 20'000'000'000;  // Whatever takes longer is taken to hang.
constexpr const char* kSecret = "sixteen bytes or more";
constexpr std::uint64_t kNbytes = 4096;
constexpr std::int64_t kMostMessages = 48;

LocalView all_of(std::byte* data) {
  TensorView tensor;
  tensor.axes.push_back({static_cast<std::int64_t>(kNbytes), 1, nullptr});
  auto storage = std::make_shared<LocalStorage>();
  storage->data = data;
  storage->nbytes = kNbytes;
  auto memory = std::make_shared<RegionMemory>();
  memory->storages.push_back(std::move(storage));
  return {std::move(memory), View{{tensor}, {}}};
}

EngineOptions options(const char* name) {
  EngineOptions out;
  out.name = name + std::to_string(getpid());
  out.transports = {"shm"};
  out.secret = kSecret;
  out.tuning.tag_ring_bytes = fuzz::kRingBytes;
  out.tuning.arrival_depth = 64;
  out.max_grants = 4096;
  return out;
}

// What lives as long as the program.
struct World {
  World() {
    EngineOptions open = options("fuzz-owner-");
    open.listen = "127.0.0.1:0";
    owner = Host::must(Engine::create(open));
    good = Host::must(Engine::create(options("fuzz-good-")));
    writer = Host::must(Engine::create(options("fuzz-writer-")));
    shared = Host::must(owner->allocator().allocate(kNbytes));
    for (std::byte* data : {shared->data(), own.data()}) {
      TensorSpec spec{"", DType::kUint8, {static_cast<std::int64_t>(kNbytes)}, {1}, data, data,
                      kNbytes, nullptr};
      regions.push_back(Host::must(owner->register_memory({&spec, 1})));
    }
    address = "kvzc-fuzz-" + std::to_string(getpid());
    listener = Host::must(listen_at(address));
  }

  // Another peer is served as if nothing had been.
  void check_served() {
    const RemoteView target = remote(Host::must(regions[++served % 2].handle()));
    source[7] = static_cast<std::byte>(served);
    const std::string tag = "served " + std::to_string(served);
    TransferOptions notify;
    notify.notify = tag;
    const LocalView local = all_of(source.data());
    const TransferItem item{&local, &target};
    const std::int64_t deadline = now_ns() + kLimitNs;
    const Transfer transfer = Host::must(good->put({&item, 1}, notify, deadline));
    KVZC_FUZZ_CHECK(transfer.wait(deadline).is_ok() && transfer.status().is_ok());
    KVZC_FUZZ_CHECK(owner->wait_arrivals(tag, 1, nullptr, deadline).is_ok());
    KVZC_FUZZ_CHECK((served % 2 == 0 ? shared->data() : own.data())[7] == source[7]);
  }

  static RemoteView remote(HandleInfo info) {
    RemoteView out;
    out.view = info.view;
    out.handle = std::make_shared<RemoteView::Shared>();
    out.handle->info = std::move(info);
    return out;
  }

  std::shared_ptr<Engine> owner, good, writer;
  std::shared_ptr<SharedAllocation> shared;
  std::array<std::byte, kNbytes> own{}, source{};
  std::vector<Region> regions;
  std::string address;
  OwnedFd listener;
  fuzz::SomeFds fds;
  std::uint64_t served = 0;
  std::uint64_t peers = 0;
};

// In slices: a program that was stopped for long, with the engines in it, has waited for one.
bool is_readable(int fd, std::int64_t limit_ns) {
  constexpr std::int64_t kSliceNs = 100'000'000;
  pollfd look{fd, POLLIN, 0};
  for (;; limit_ns -= kSliceNs) {
    if (poll(&look, 1, static_cast<int>(std::min(limit_ns, kSliceNs) / 1'000'000)) > 0) return true;
    if (limit_ns <= kSliceNs) return false;
  }
}

class Peer {
 public:
  Peer(World& world, Input& in) : world_(world), in_(in) {}

  void play() {
    const std::uint8_t how = in_.u8();
    is_stream_ = (how & 1) != 0;
    is_owner_ = (how & 2) != 0;
    const int steps = how >> 2 & 3;  // Of the handshake, done as they should be.
    // Whoever drops its connection and lives is given a moment; most say goodbye.
    const bool says_bye = (how >> 4) != 0;
    make_memory();
    Transfer transfer;
    std::optional<RemoteView> target;
    if (is_owner_) {
      is_stream_ = false;
      target = invite();
      const LocalView local = all_of(world_.source.data());
      const TransferItem item{&local, &*target};
      TransferOptions notify;
      notify.notify = "from the writer";
      transfer = Host::must(world_.writer->put({&item, 1}, notify, now_ns() + kLimitNs));
      KVZC_FUZZ_CHECK(is_readable(world_.listener.get(), kLimitNs));
      socket_ = ControlSocket(ControlSocket::Kind::kUnix,
                              Host::must(accept_from(world_.listener.get())));
      begin_as_owner(steps);
    } else {
      call();
      begin_as_holder(steps);
    }
    for (int left = kMostMessages; left > 0 && !in_.is_at_end(); --left) step();
    if (says_bye) send(wire::encode(wire::Type::kBye, {Code::kClosed, "the end"}));
    ::shutdown(socket_.fd(), SHUT_WR);
    // It ends on the other side too.
    while (receive()) {
    }
    // Whatever was written there: this side is out of all memory now.
    for (auto& place : outbox_.page().busy) place.mark = 0;
    socket_ = {};
    if (grant_) (void)grant_->revoke(now_ns() + kLimitNs, Force::kNo);
    if (transfer.is_valid()) {
      (void)transfer.wait(now_ns() + kLimitNs);
      KVZC_FUZZ_CHECK(transfer.has_ended());
    }
    (void)world_.owner->poll_arrivals(SIZE_MAX);
  }

 private:
  void make_memory() {
    OwnedFd memory = fuzz::make_memory(sizeof(shm::OutboxPage) + fuzz::kRingBytes);
    outbox_fd_ = OwnedFd(fcntl(memory.get(), F_DUPFD_CLOEXEC, 0));
    outbox_ = Host::must(shm::Outbox::open(std::move(memory), fuzz::kRingBytes));
    incarnation_[0] = std::byte{0xfe};
    const std::uint64_t number = ++world_.peers;
    std::memcpy(&incarnation_[1], &number, sizeof number);
  }

  // --- The beginnings ---

  void call() {
    Region& region = world_.regions[in_.u8() % world_.regions.size()];
    info_ = Host::must(region.handle());
    if (in_.u8() % 4 == 0) {
      grant_ = Host::must(world_.owner->grant(Host::must(region.view()), Access::kPut));
      info_ = Host::must(grant_->handle());
    }
    for (const EngineAddress& address : info_.addresses) {
      if ((address.kind == AddressKind::kTcp) != is_stream_) continue;
      const auto kind = is_stream_ ? ControlSocket::Kind::kTcp : ControlSocket::Kind::kUnix;
      // A full queue of connections empties.
      for (int tries = 0;; ++tries) {
        Result<OwnedFd> fd = is_stream_ ? begin_connect_tcp(address.text) : connect_to(address.text);
        if (!fd.is_ok() && tries < 10000 && fd.status().code() == Code::kWouldBlock) {
          usleep(1000);
          continue;
        }
        socket_ = ControlSocket(kind, Host::must(std::move(fd)));
        break;
      }
      if (is_stream_) {
        pollfd look{socket_.fd(), POLLOUT, 0};
        KVZC_FUZZ_CHECK(poll(&look, 1, 20000) == 1);
      }
      return;
    }
    KVZC_FUZZ_CHECK(false && "the owner has no such address");
  }

  void begin_as_holder(int steps) {
    hello_.from = incarnation_;
    hello_.to = info_.incarnation;
    hello_.grant_id = info_.grant_id;
    hello_.engine_name = "fuzz";
    if (steps < 1) return;
    send(wire::encode(hello_));
    if (!await(wire::Type::kChallenge) || steps < 2) return;
    send_proof();
    if (steps > 2) (void)await(wire::Type::kWelcome);
  }

  RemoteView invite() {
    info_.incarnation = incarnation_;
    info_.engine_name = "fuzz";
    info_.addresses.push_back({AddressKind::kUnix, world_.address});
    info_.grant_id = 77;
    info_.storage_nbytes.push_back(kNbytes);
    info_.view = all_of(nullptr).view;
    return World::remote(info_);
  }

  void begin_as_owner(int steps) {
    if (!await(wire::Type::kHello) || steps < 1) return;
    send_challenge();
    if (!await(wire::Type::kProof) || steps < 2) return;
    send_welcome();
    if (!await(wire::Type::kAttach) || steps < 3) return;
    send_storage(1, kNbytes, 7);
    send_attached(Code::kOk, 1);
  }

  // --- The messages ---

  std::vector<wire::Offer> offers(std::vector<OwnedFd>* fds) {
    ByteWriter bytes;
    bytes.u32(fuzz::kRingBytes);
    bytes.u32(fuzz::kSlots);
    bytes.u32(64);
    bytes.u64(0);
    fds->push_back(OwnedFd(fcntl(outbox_fd_.get(), F_DUPFD_CLOEXEC, 0)));
    for (std::uint8_t which = 1; which <= 3; ++which) fds->push_back(world_.fds.pick(which));
    std::vector<wire::Offer> out;
    out.push_back({"shm", bytes.take(), 4});
    return out;
  }
  Digest prove(std::string_view role) const {
    return wire::prove(info_.key, role, session_, info_.grant_id);
  }
  void send_proof() {
    std::vector<OwnedFd> fds;
    wire::Proof proof{prove("kvzc holder"), offers(&fds)};
    send(wire::encode(proof), std::move(fds));
  }
  void send_challenge() {
    wire::Challenge challenge;
    session_ = wire::session(hello_, challenge.nonce);
    challenge.proof = prove("kvzc owner");
    challenge.engine_name = "fuzz";
    send(wire::encode(challenge));
  }
  void send_welcome() {
    std::vector<OwnedFd> fds;
    wire::Welcome welcome{offers(&fds)};
    send(wire::encode(welcome), std::move(fds));
  }
  void send_storage(std::uint64_t id, std::uint64_t nbytes, std::uint8_t which) {
    wire::Storage storage{id, nbytes, {}};
    storage.roads.push_back({"shm", Code::kOk, "", {std::byte{1}}, 1});
    std::vector<OwnedFd> fds;
    fds.push_back(world_.fds.pick(which));
    send(wire::encode(storage), std::move(fds));
  }
  void send_attached(Code code, std::uint64_t storage) {
    wire::Attached attached;
    attached.request = request_;
    attached.code = code;
    attached.proof = prove("kvzc attached");
    attached.fence_slot = in_.u8();
    attached.fence_epoch = in_.u8();
    attached.storages = {storage};
    send(wire::encode(attached));
  }

  void step() {
    switch (in_.u8() % 20) {
      case 0: {
        const fuzz::Bytes bytes = in_.part();
        return send({bytes.begin(), bytes.end()});
      }
      case 1: {
        // Any type, with a sound header.
        ByteWriter out;
        out.u16(in_.u8() % 12);
        out.u16(0);
        const fuzz::Bytes body = in_.part();
        out.u32(static_cast<std::uint32_t>(wire::kHeaderBytes + body.size()));
        out.raw(body);
        return send(out.take());
      }
      case 2:
        return send(wire::encode(hello_));
      case 3:
        return send_proof();
      case 4: {
        wire::Attach attach{in_.u8(), info_.grant_id, prove("kvzc attach")};
        return send(wire::encode(attach));
      }
      case 5: {
        const std::uint8_t id = in_.u8();
        const std::uint64_t nbytes = in_.u8() % 2 == 0 ? kNbytes : in_.u16();
        return send_storage(id, nbytes, in_.u8());
      }
      case 6: {
        request_ = in_.u8();
        const Code code = code_from_wire(in_.u8());
        return send_attached(code, in_.u8());
      }
      case 7:
        return send(wire::encode(wire::Release{in_.u8()}));
      case 8:
        return send(wire::encode_kick());
      case 9: {
        const Code code = code_from_wire(in_.u8());
        const auto type = in_.u8() % 2 == 0 ? wire::Type::kBye : wire::Type::kRefuse;
        return send(wire::encode(type, {code, std::string(fuzz::as_text(in_.part()))}));
      }
      case 10:
        return send_challenge();
      case 11:
        return send_welcome();
      case 12: {
        // What both map: the marks, the counts and the ring.
        const std::uint16_t at = in_.u16();
        const fuzz::Bytes bytes = in_.part();
        const std::size_t room = sizeof(shm::OutboxPage) + fuzz::kRingBytes;
        auto* page = reinterpret_cast<std::byte*>(&outbox_.page());
        for (std::size_t i = 0; i < bytes.size(); ++i) page[(at + i) % room] = bytes[i];
        return;
      }
      case 13: {
        // A tag as it should be.
        const fuzz::Bytes tag = in_.part();
        if (tag.size() > kMaxTagBytes) return;
        std::array<std::byte, 8> header{static_cast<std::byte>(tag.size())};
        const std::uint64_t tail = outbox_.page().writer.tail;
        outbox_.write(tail, header.data(), header.size());
        outbox_.write(tail + 8, tag.data(), tag.size());
        outbox_.page().writer.tail = tail + shm::record_bytes(tag.size());
        return;
      }
      case 14:
        mutations_ = in_.part();
        return;
      case 15:
        (void)await(static_cast<wire::Type>(in_.u8() % 12), 1'000'000);
        return;
      case 16:
        more_fds_ = in_.u8() % 4;
        return;
      case 17: {
        if (!grant_) return;
        const Force force = in_.u8() % 2 == 0 ? Force::kNo : Force::kYes;
        (void)grant_->revoke(now_ns() + 1'000'000, force);
        return;
      }
      case 18:
        pieces_ = in_.u8();
        return;
      default:
        // Of our own side nothing comes any more.
        if (in_.u8() % 8 == 0) ::shutdown(socket_.fd(), SHUT_WR);
    }
  }

  // --- The socket ---

  // With the changes that were asked for: each a place and what to turn over there.
  void send(std::vector<std::byte> bytes, std::vector<OwnedFd> fds = {}) {
    Input changes(std::exchange(mutations_, {}));
    while (!changes.is_at_end() && !bytes.empty()) {
      const std::size_t at = changes.u8() % bytes.size();
      bytes[at] ^= static_cast<std::byte>(changes.u8());
    }
    for (; more_fds_ > 0; --more_fds_) fds.push_back(world_.fds.pick(in_.u8()));
    if (bytes.empty()) return;
    if (is_stream_) {
      // In pieces, since nothing keeps messages together.
      for (std::size_t at = 0; at < bytes.size();) {
        const std::size_t nbytes = pieces_ == 0 ? bytes.size() : std::min<std::size_t>(pieces_, bytes.size() - at);
        if (::send(socket_.fd(), bytes.data() + at, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
        at += nbytes;
      }
      return;
    }
    (void)send_message(socket_.fd(), bytes, fds);
  }

  // Gives the next message; nothing at the end of the connection.
  std::optional<Message> receive(std::int64_t limit_ns = kLimitNs) {
    for (;;) {
      Result<Message> message = socket_.receive();
      if (message.is_ok()) return message.take();
      if (message.status().code() != Code::kWouldBlock) return std::nullopt;
      if (!is_readable(socket_.fd(), limit_ns)) {
        KVZC_FUZZ_CHECK(limit_ns != kLimitNs);
        return std::nullopt;
      }
    }
  }

  bool await(wire::Type type, std::int64_t limit_ns = kLimitNs) {
    while (const std::optional<Message> message = receive(limit_ns)) {
      const auto opened = wire::open(message->bytes);
      KVZC_FUZZ_CHECK(opened.is_ok());  // Engines say nothing that is none.
      take(opened->first, opened->second);
      if (opened->first == type) return true;
    }
    return false;
  }

  void take(wire::Type type, fuzz::Bytes body) {
    if (type == wire::Type::kHello) {
      hello_ = Host::must(wire::decode_hello(body));
    } else if (type == wire::Type::kChallenge) {
      const wire::Challenge challenge = Host::must(wire::decode_challenge(body));
      session_ = wire::session(hello_, challenge.nonce, is_stream_ ? kSecret : "");
    } else if (type == wire::Type::kAttach) {
      request_ = Host::must(wire::decode_attach(body)).request;
    }
  }

  World& world_;
  Input& in_;
  bool is_stream_ = false;
  bool is_owner_ = false;
  ControlSocket socket_;
  OwnedFd outbox_fd_;
  shm::Outbox outbox_;
  Incarnation incarnation_{};
  HandleInfo info_;
  std::optional<Grant> grant_;
  wire::Hello hello_;
  Digest session_{};
  std::uint32_t request_ = 1;
  fuzz::Bytes mutations_;
  int more_fds_ = 0;
  std::size_t pieces_ = 0;
};

}  // namespace

KVZC_FUZZ_TARGET(control)(fuzz::Bytes input) {
  static World* const world = new World;  // Never destroyed: the program ends with its threads.
  static unsigned runs = 0;
  Input in(input);
  Peer(*world, in).play();
  if (++runs % 64 == 1) world->check_served();
}

}  // namespace kvzc

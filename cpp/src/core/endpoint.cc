#include "core/endpoint.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/clock.h"
#include "base/futex.h"
#include "base/process.h"
#include "base/tcp_socket.h"

namespace kvzc {
namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;
constexpr std::size_t kMostOutgoing = 16384;
constexpr std::size_t kMostAttaching = 256;
constexpr std::int64_t kConnectRetryNs = 5'000'000;
constexpr std::int64_t kFirstDoubtNs = 1'000'000;
// One bounded copy of a peer that runs takes some ten microseconds.
constexpr std::int64_t kCutPatienceNs = 10'000'000;
constexpr std::int64_t kExitPatienceNs = 50'000'000;

// Roles of proofs; one side's never serves as the other's.
constexpr std::string_view kOwnerRole = "kvzc owner";
constexpr std::string_view kHolderRole = "kvzc holder";
constexpr std::string_view kAttachRole = "kvzc attach";
constexpr std::string_view kAttachedRole = "kvzc attached";

Status out_of_order() {
  return Status(Code::kProtocol, "the peer sent a control message out of order");
}

// Names a storage to a peer, together with what the peer may do there.
std::uint64_t shared_id(std::uint64_t storage, Access access) {
  return storage << 2 | static_cast<std::uint64_t>(access);
}

// Splits the descriptors of a message among its parts.
Result<std::vector<OwnedFd>> take_fds(std::vector<OwnedFd>& fds, std::size_t* at,
                                      std::size_t count) {
  std::vector<OwnedFd> out;
  if (count > fds.size() - *at) {
    return Status(Code::kProtocol, "the peer sent fewer descriptors than it said");
  }
  for (; count > 0; --count) out.push_back(std::move(fds[(*at)++]));
  return out;
}

}  // namespace

Endpoint::Endpoint(EndpointHost& host, std::int64_t handshake_deadline_ns)
    : host_(host), handshake_deadline_ns_(handshake_deadline_ns) {}

Endpoint::~Endpoint() = default;

// --- Any thread ---

Status Endpoint::why() const {
  const MutexLock lock(why_mutex_);
  return why_;
}

void Endpoint::drain() {
  for (const auto& channel : channels_) {
    if (channel) channel->drain();
  }
  look_at_channels();
}

void Endpoint::look_at_channels() {
  // A peer that breaks its promises on one channel is lost as a whole.
  for (const auto& channel : channels_) {
    if (!channel || is_lost()) continue;
    if (Status why = channel->lost(); !why.is_ok()) {
      // A channel may find out while this goes away.
      std::shared_ptr<Endpoint> keep = weak_from_this().lock();
      if (!keep) return;
      // Given away: the last to let go must not be a channel's thread, which holds locks that the end
      // of a channel takes.
      host_.loop().post([self = std::move(keep), why] {
        // The peer may have said why.
        if (!self->is_lost()) self->on_events(EPOLLIN);
        self->lose(why, PeerFate::kUnknown);
      });
      return;
    }
  }
}

PeerTraffic& Endpoint::tag_traffic() const {
  return **std::find_if(traffic_.begin(), traffic_.end(),
                        [](const auto& traffic) { return traffic != nullptr; });
}

Channel* Endpoint::tag_channel() const {
  // Tags without data go by the first channel that both sides have.
  const auto first = std::find_if(channels_.begin(), channels_.end(),
                                  [](const auto& channel) { return channel != nullptr; });
  return first == channels_.end() ? nullptr : first->get();
}

const char* Endpoint::tag_transport() const {
  for (std::size_t i = 0; i < channels_.size(); ++i) {
    if (channels_[i]) return host_.transports()[i]->name();
  }
  return nullptr;
}

void Endpoint::grant_credits(std::size_t transport, std::uint32_t count) {
  channels_[transport]->grant_credits(count);
}

void Endpoint::look() {
  for (const auto& channel : channels_) {
    if (channel) channel->look();
  }
}

void Endpoint::begin_rest() {
  for (const auto& channel : channels_) {
    if (channel) channel->begin_rest();
  }
}

void Endpoint::end_rest() {
  for (const auto& channel : channels_) {
    if (channel) channel->end_rest();
  }
}

Status Endpoint::fence(std::span<const FenceTicket> grants, std::int64_t deadline_ns) {
  // Others it never held: it need not be asked.
  std::vector<FenceTicket> held;
  {
    const MutexLock lock(held_mutex_);
    for (const FenceTicket& grant : grants) {
      const auto found = held_.find(grant.slot);
      if (found != held_.end() && found->second == grant.epoch) held.push_back(grant);
    }
  }
  if (held.empty()) return Status::ok();
  for (const auto& channel : channels_) {
    if (!channel) continue;
    Status fenced = channel->fence(held, deadline_ns);
    if (!fenced.is_ok()) {
      return Status(fenced.code(), peer_words() + ": " + std::string(fenced.text()));
    }
  }
  const MutexLock lock(held_mutex_);
  for (const FenceTicket& grant : held) {
    const auto found = held_.find(grant.slot);
    if (found != held_.end() && found->second == grant.epoch) held_.erase(found);
  }
  return Status::ok();
}

bool Endpoint::note_held(const GrantRecord& grant) {
  {
    const MutexLock lock(held_mutex_);
    held_[grant.fence.slot] = grant.fence.epoch;
  }
  // Looked at again: a revoke from here on finds it noted, and one before is seen now.
  return host_.grants().find(grant.id) != nullptr;
}

Status Endpoint::cut_channels(std::int64_t deadline_ns) {
  Status outcome;
  for (const auto& channel : channels_) {
    if (!channel) continue;
    Status cut = channel->cut_off(deadline_ns);
    if (!cut.is_ok() && outcome.is_ok()) {
      outcome = Status(cut.code(), peer_words() + ": " + std::string(cut.text()));
    }
  }
  return outcome;
}

Status Endpoint::cut_off(const Status& why, std::int64_t deadline_ns) {
  for (const auto& channel : channels_) {
    if (channel) channel->lose(why, PeerFate::kUnknown);
  }
  Status outcome = cut_channels(deadline_ns);
  const PeerFate fate = outcome.is_ok() ? PeerFate::kGone : PeerFate::kUnknown;
  host_.loop().post([self = shared_from_this(), why, fate] { self->say_bye(why, fate); });
  return outcome;
}

std::string_view Endpoint::secret() const {
  return is_remote() ? std::string_view(host_.options().secret) : std::string_view();
}

std::string Endpoint::peer_words() const {
  if (!info_) return "the peer";
  return "engine '" + info_->engine_name + "' (" +
         (info_->address.empty() ? "pid " + std::to_string(info_->pid) : "at " + info_->address) + ")";
}

// --- Set-up ---

void Endpoint::connect(std::shared_ptr<Binding> first) {
  first_ = std::move(first);
  peer_incarnation_ = first_->info().incarnation;
  stage_ = Stage::kConnecting;
  try_connect();
}

void Endpoint::try_connect() {
  if (stage_ != Stage::kConnecting || is_lost()) return;
  const std::vector<EngineAddress>& addresses = first_->info().addresses;
  if (address_at_ == addresses.size()) {
    if (unreached_.is_ok()) unreached_ = Status(Code::kBadHandle, "the handle has no address");
    return lose(unreached_, PeerFate::kUnknown);
  }
  const EngineAddress& address = addresses[address_at_];
  switch (address.kind) {
    case AddressKind::kUnix:
      return connect_on_host(address.text);
    case AddressKind::kTcp:
      return connect_to_host(address.text);
  }
  next_address(Status(Code::kTransportUnavailable,
                      "the handle has an address of a kind that this kvzc does not know"));
}

void Endpoint::next_address(Status why) {
  // All reasons are told; the last decides what kind of failure it is, unless an engine has answered
  // that the handle is from an earlier one.
  const bool is_remote_address = first_->info().addresses[address_at_].kind == AddressKind::kTcp;
  if (is_remote_address && why.code() == Code::kPeerLost) have_all_answered_ = false;
  if (unreached_.is_ok()) {
    unreached_ = std::move(why);
  } else {
    const Code code = unreached_.code() == Code::kStaleHandle ? Code::kStaleHandle : why.code();
    unreached_ = Status(code, std::string(unreached_.text()) + "; " + std::string(why.text()));
  }
  ++address_at_;
  try_connect();
}

bool Endpoint::try_elsewhere(const Status& why) {
  if (is_server_ || !is_remote() || stage_ == Stage::kReady || !first_) return false;
  switch (why.code()) {
    case Code::kStaleHandle:
    case Code::kAccessDenied:
    case Code::kBadHandle:
    case Code::kProtocol:
    case Code::kUnsupported:
    case Code::kPeerLost:
      break;
    default:
      return false;  // The one that was meant has said so, or this engine.
  }
  if (address_at_ + 1 >= first_->info().addresses.size() || now_ns() >= handshake_deadline_ns_) {
    return false;
  }
  const std::string where = remote_address(socket_.fd());
  drop_connection();
  next_address(Status(why.code(), where + ": " + std::string(why.text())));
  return true;
}

void Endpoint::drop_connection() {
  host_.loop().unwatch(socket_.fd());
  host_.sockets().remove(socket_.fd());
  socket_ = {};
  stage_ = Stage::kConnecting;
  wants_write_ = false;
  outgoing_.clear();
  halves_.clear();
  channels_.clear();
}

void Endpoint::connect_on_host(const std::string& address) {
  Result<OwnedFd> socket = connect_to(address);
  if (!socket.is_ok()) {
    if (socket.status().code() != Code::kWouldBlock) return next_address(socket.status());
    host_.loop().run_at(now_ns() + kConnectRetryNs,
                        [self = shared_from_this()] { self->try_connect(); });
    return;
  }
  socket_ = ControlSocket(ControlSocket::Kind::kUnix, socket.take());
  Result<PeerCredentials> credentials = peer_credentials(socket_.fd());
  if (!credentials.is_ok()) return lose(credentials.status(), PeerFate::kUnknown);
  credentials_ = *credentials;
  if (!host_.is_allowed(credentials_.uid)) {
    return lose(Status(Code::kAccessDenied,
                       "the engine at '" + address + "' runs as user id " +
                           std::to_string(credentials_.uid) +
                           ", which is not ours; name that user in Engine(allow_users=[...]) on "
                           "both sides to allow it"),
                PeerFate::kUnknown);
  }
  say_hello();
}

void Endpoint::connect_to_host(const std::string& address) {
  if (host_.options().secret.empty()) {
    return next_address(Status(Code::kAccessDenied,
                               "its owner is on another host, at " + address +
                                   "; engines that meet over a network share a secret: give this "
                                   "one the owner's, Engine(secret=...)"));
  }
  Result<OwnedFd> socket = begin_connect_tcp(address);
  if (!socket.is_ok()) return next_address(socket.status());
  socket_ = ControlSocket(ControlSocket::Kind::kTcp, socket.take());
  host_.sockets().add(socket_.fd());
  const auto give_up = [this](Status why) {
    drop_connection();
    next_address(std::move(why));
  };
  Status watched = host_.loop().watch(
      socket_.fd(), EPOLLOUT, [self = shared_from_this(), address, give_up](std::uint32_t) {
        Status connected = connect_result(self->socket_.fd(), address);
        if (!connected.is_ok()) return give_up(std::move(connected));
        self->host_.loop().unwatch(self->socket_.fd());
        self->host_.sockets().remove(self->socket_.fd());
        detect_silence(self->socket_.fd(), self->host_.options().peer_timeout_seconds);
        self->say_hello();
      });
  if (!watched.is_ok()) return give_up(watched);
  // Each address has its share of the time, so that one behind a firewall, or where somebody accepts
  // and says nothing, does not hide the next. The timer does not keep an endpoint that has ended.
  const std::int64_t now = now_ns();
  const auto left = static_cast<std::int64_t>(first_->info().addresses.size() - address_at_);
  const std::int64_t share = (handshake_deadline_ns_ - now) * 9 / 10 / left;
  host_.loop().run_at(now + share, [weak = weak_from_this(), at = address_at_, address, left, give_up] {
    const std::shared_ptr<Endpoint> self = weak.lock();
    if (!self || self->is_lost() || self->stage_ == Stage::kReady || self->address_at_ != at) return;
    if (self->stage_ == Stage::kConnecting) {
      give_up(Status(Code::kPeerLost, "nobody answers at " + address +
                                          ": its host is down, or a firewall is between"));
    } else if (left > 1) {
      give_up(Status(Code::kPeerLost, "who listens at " + address + " says nothing"));
    }
  });
}

void Endpoint::say_hello() {
  Status watched = watch_socket();
  if (!watched.is_ok()) return lose(watched, PeerFate::kUnknown);
  const HandleInfo& info = first_->info();
  hello_.from = host_.incarnation();
  hello_.to = info.incarnation;
  hello_.grant_id = info.grant_id;
  hello_.engine_name = host_.engine_name();
  Status filled = fill_random(hello_.nonce);
  if (!filled.is_ok()) return lose(filled, PeerFate::kUnknown);
  stage_ = Stage::kAwaitChallenge;
  send(wire::encode(hello_));
}

void Endpoint::accept(ControlSocket socket) {
  is_server_ = true;
  stage_ = Stage::kAwaitHello;
  socket_ = std::move(socket);
  Status watched = watch_socket();
  if (!watched.is_ok()) return lose(watched, PeerFate::kUnknown);
  if (is_remote()) return detect_silence(socket_.fd(), host_.options().peer_timeout_seconds);
  Result<PeerCredentials> credentials = peer_credentials(socket_.fd());
  if (!credentials.is_ok()) return lose(credentials.status(), PeerFate::kUnknown);
  credentials_ = *credentials;
  if (!host_.is_allowed(credentials_.uid)) {
    const Status refused = refuse(
        Code::kAccessDenied, "the engine '" + host_.engine_name() + "' does not serve user id " +
                                 std::to_string(credentials_.uid) +
                                 "; name that user in its Engine(allow_users=[...]) to allow it");
    lose(refused, PeerFate::kUnknown);
  }
}

Status Endpoint::watch_socket() {
  host_.sockets().add(socket_.fd());
  return host_.loop().watch(
      socket_.fd(), EPOLLIN,
      [self = shared_from_this()](std::uint32_t events) { self->on_events(events); });
}

Status Endpoint::watch_process() {
  if (is_remote()) return Status::ok();
  pidfd_ = open_pidfd(socket_.fd(), credentials_.pid);
  if (!pidfd_.is_valid()) return Status::ok();  // The connection's end must do.
  return host_.loop().watch(pidfd_.get(), EPOLLIN,
                            [self = shared_from_this()](std::uint32_t) { self->on_exit(); });
}

void Endpoint::on_exit() {
  const std::shared_ptr<Endpoint> self = shared_from_this();
  // What it said before the end still counts.
  if (!is_lost() && !is_socket_closed_) on_events(EPOLLIN);
  peer_has_exited();
}

void Endpoint::peer_has_exited() {
  const std::shared_ptr<Endpoint> self = shared_from_this();
  if (!is_lost()) {
    has_peer_ended_ = true;
    lose(Status(Code::kPeerLost, peer_words() + " is gone: its process has exited or was killed"),
         PeerFate::kGone);
  }
  become_gone();
}

void Endpoint::on_end_of_connection(const Status& how) {
  // All that it said was read.
  if (is_remote()) {
    // A kernel over there has closed it, which it does for processes that exit.
    has_peer_ended_ = how.code() == Code::kPeerLost;
    return lose(Status(Code::kPeerLost, peer_words() + " is lost: " + std::string(how.text())),
                PeerFate::kUnknown);
  }
  if (!pidfd_.is_valid()) return peer_has_exited();
  // A process closes its files a moment before it counts as exited; that is waited for, but by a
  // timer: many may end at once.
  close_socket();
  if (has_exited(pidfd_.get())) return peer_has_exited();
  host_.loop().run_at(now_ns() + kExitPatienceNs, [self = shared_from_this()] {
    self->lose(Status(Code::kPeerLost, self->peer_words() +
                                           " has dropped its connection, though its process lives"),
               PeerFate::kUnknown);
  });
}

void Endpoint::on_events(std::uint32_t events) {
  if (is_lost()) return read_to_the_end();
  if ((events & EPOLLOUT) != 0) flush();
  // As much as is there, but not for ever: other peers wait too.
  for (int messages = 0; messages < 64 && !is_lost(); ++messages) {
    Result<Message> message = socket_.receive();
    if (!message.is_ok()) {
      if (message.status().code() == Code::kWouldBlock) break;
      const bool is_end =
          message.status().code() == Code::kPeerLost || message.status().code() == Code::kTimedOut;
      if (is_end && stage_ == Stage::kReady) {
        on_end_of_connection(message.status());
      } else {
        lose(message.status(), PeerFate::kUnknown);
      }
      return;
    }
    on_message(message.take());
    if (stage_ == Stage::kConnecting) return;  // It was not who was meant.
  }
  // A kick that met a full socket was not sent; what filled the socket was.
  if (is_ready() && !is_lost()) drain();
}

void Endpoint::read_to_the_end() {
  for (int messages = 0; messages < 64; ++messages) {
    const Result<Message> message = socket_.receive();
    if (message.is_ok() || message.status().code() == Code::kProtocol ||
        message.status().code() == Code::kLimitExceeded) {
      continue;  // Whatever it still says.
    }
    if (message.status().code() == Code::kWouldBlock) return;
    break;
  }
  // The end of a connection proves the end of a process only on one host, and only where nothing
  // better is known.
  if (pidfd_.is_valid() || is_remote()) return close_socket();
  become_gone();
}

void Endpoint::settle_doubt(std::int64_t pause_ns) {
  if (!is_doubtful_) return;
  if (cut_channels(0).is_ok()) return become_gone();
  host_.loop().run_at(now_ns() + pause_ns, [self = shared_from_this(), pause_ns] {
    self->settle_doubt(std::min(2 * pause_ns, kSecondNs));
  });
}

void Endpoint::become_gone() {
  if (pidfd_.is_valid()) host_.loop().unwatch(pidfd_.get());
  if (!std::exchange(is_doubtful_, false)) return;
  const std::shared_ptr<Endpoint> self = shared_from_this();
  for (const auto& channel : channels_) {
    if (channel) channel->lose(why(), PeerFate::kGone);
  }
  close_socket();
  host_.endpoint_gone(*this);
}

void Endpoint::close_socket() {
  if (std::exchange(is_socket_closed_, true)) return;
  host_.loop().unwatch(socket_.fd());
  host_.sockets().remove(socket_.fd());
  // Kicks may come from any thread: the number must not become another file's. Shut, not closed.
  ::shutdown(socket_.fd(), SHUT_RDWR);
}

void Endpoint::on_message(Message message) {
  const auto opened = wire::open(message.bytes);
  Status handled = opened.is_ok() ? handle(opened->first, opened->second, std::move(message.fds))
                                  : opened.status();
  if (!handled.is_ok()) lose(handled, PeerFate::kUnknown);
}

Status Endpoint::handle(wire::Type type, std::span<const std::byte> body,
                        std::vector<OwnedFd> fds) {
  // Gives a decoded body to `then`, or says why it could not be decoded.
  const auto with = [](auto decoded, auto then) -> Status {
    if (!decoded.is_ok()) return decoded.status();
    return then(*decoded);
  };
  switch (type) {
    case wire::Type::kHello:
      if (stage_ != Stage::kAwaitHello) return out_of_order();
      return with(wire::decode_hello(body), [&](auto& m) { return on_hello(m); });
    case wire::Type::kChallenge:
      if (stage_ != Stage::kAwaitChallenge) return out_of_order();
      return with(wire::decode_challenge(body), [&](auto& m) { return on_challenge(m); });
    case wire::Type::kProof:
      if (stage_ != Stage::kAwaitProof) return out_of_order();
      return with(wire::decode_proof(body), [&](auto& m) { return on_proof(m, std::move(fds)); });
    case wire::Type::kWelcome:
      if (stage_ != Stage::kAwaitWelcome) return out_of_order();
      return with(wire::decode_welcome(body),
                  [&](auto& m) { return on_welcome(m, std::move(fds)); });
    case wire::Type::kRefuse:
      if (is_server_ || stage_ == Stage::kReady) return out_of_order();
      return with(wire::decode_refuse(body), [&](auto& m) {
        return Status(m.code == Code::kOk ? Code::kProtocol : m.code, m.text);
      });
    case wire::Type::kBye:
      return with(wire::decode_refuse(body), [&](auto& m) {
        // It has fenced its own writers before it said so.
        has_peer_ended_ = m.code == Code::kClosed;
        lose(Status(Code::kPeerLost, peer_words() + " has gone: " + m.text), PeerFate::kGone);
        return Status::ok();
      });
    default:
      break;
  }
  if (stage_ != Stage::kReady) return out_of_order();
  switch (type) {
    case wire::Type::kAttach:
      return with(wire::decode_attach(body), [&](auto& m) { return on_attach(m); });
    case wire::Type::kStorage:
      return with(wire::decode_storage(body),
                  [&](auto& m) { return on_storage(m, std::move(fds)); });
    case wire::Type::kAttached:
      return with(wire::decode_attached(body), [&](auto& m) {
        on_attached(m);
        return Status::ok();
      });
    case wire::Type::kRelease:
      return with(wire::decode_release(body), [&](auto& m) {
        on_release(m);
        return Status::ok();
      });
    case wire::Type::kKick:
      drain();
      return Status::ok();
    default:
      return out_of_order();
  }
}

Status Endpoint::on_hello(const wire::Hello& hello) {
  if (hello.lowest_version > wire::kProtocolVersion ||
      hello.highest_version < wire::kProtocolVersion) {
    return refuse(Code::kUnsupported,
                  "the engine '" + host_.engine_name() + "' speaks control protocol 1, the peer " +
                      std::to_string(hello.lowest_version) + " to " +
                      std::to_string(hello.highest_version) + ": use the same kvzc on both sides");
  }
  if (hello.to != host_.incarnation()) {
    return refuse(Code::kStaleHandle,
                  "the handle is from an earlier life of engine '" + host_.engine_name() +
                      "', which has restarted since; ask it for a fresh handle");
  }
  door_ = host_.grants().find(hello.grant_id);
  if (!door_) {
    return refuse(Code::kRevoked,
                  "the owner has revoked this grant, or closed its region; ask it for a new "
                  "handle");
  }
  hello_ = hello;
  peer_incarnation_ = hello.from;
  peer_name_ = hello.engine_name;
  wire::Challenge challenge;
  Status filled = fill_random(challenge.nonce);
  if (!filled.is_ok()) return filled;
  session_ = wire::session(hello_, challenge.nonce, secret());
  challenge.proof = wire::prove(door_->key, kOwnerRole, session_, door_->id);
  challenge.engine_name = host_.engine_name();
  stage_ = Stage::kAwaitProof;
  send(wire::encode(challenge));
  return Status::ok();
}

Status Endpoint::on_challenge(const wire::Challenge& challenge) {
  session_ = wire::session(hello_, challenge.nonce, secret());
  const HandleInfo& info = first_->info();
  if (challenge.version != wire::kProtocolVersion ||
      !equal_in_constant_time(challenge.proof,
                              wire::prove(info.key, kOwnerRole, session_, info.grant_id))) {
    if (is_remote()) {
      return Status(Code::kAccessDenied,
                    "who listens at " + remote_address(socket_.fd()) +
                        " has another secret than this engine, or does not know the handle's key; "
                        "give both the same Engine(secret=...), and use a fresh handle");
    }
    return Status(Code::kBadHandle,
                  "who listens at the handle's address does not know the handle's key: the handle "
                  "is forged or damaged, or another program has taken the address");
  }
  peer_name_ = challenge.engine_name;
  wire::Proof proof;
  proof.proof = wire::prove(info.key, kHolderRole, session_, info.grant_id);
  std::vector<OwnedFd> fds;
  Status offered = make_offers(&proof.offers, &fds);
  if (!offered.is_ok()) return offered;
  stage_ = Stage::kAwaitWelcome;
  send(wire::encode(proof), std::move(fds));
  return Status::ok();
}

Status Endpoint::on_proof(const wire::Proof& proof, std::vector<OwnedFd> fds) {
  if (!equal_in_constant_time(proof.proof,
                              wire::prove(door_->key, kHolderRole, session_, door_->id))) {
    if (is_remote()) {
      return refuse(Code::kAccessDenied, "the peer has another secret than engine '" +
                                             host_.engine_name() +
                                             "', or does not know the key of the grant it named");
    }
    return refuse(Code::kBadHandle, "the peer does not know the key of the grant it named");
  }
  host_.endpoint_returned(*this);
  wire::Welcome welcome;
  std::vector<OwnedFd> own_fds;
  Status joined = make_offers(&welcome.offers, &own_fds);
  if (joined.is_ok()) joined = join_offers(proof.offers, std::move(fds));
  if (!joined.is_ok()) return refuse(joined.code(), std::string(joined.text()));
  send(wire::encode(welcome), std::move(own_fds));
  become_ready();
  return Status::ok();
}

Status Endpoint::on_welcome(const wire::Welcome& welcome, std::vector<OwnedFd> fds) {
  Status joined = join_offers(welcome.offers, std::move(fds));
  if (!joined.is_ok()) return joined;
  become_ready();
  return Status::ok();
}

Status Endpoint::make_offers(std::vector<wire::Offer>* offers, std::vector<OwnedFd>* fds) {
  for (const auto& transport : host_.transports()) {
    if (is_remote() && transport->is_local()) {
      halves_.push_back(nullptr);
      continue;
    }
    Result<std::unique_ptr<ChannelHalf>> half = transport->open_channel();
    if (!half.is_ok()) return half.status();
    Result<Blob> blob = (*half)->offer();
    if (!blob.is_ok()) return blob.status();
    offers->push_back({std::string(transport->name()), std::move(blob->bytes),
                       static_cast<std::uint8_t>(blob->fds.size())});
    std::move(blob->fds.begin(), blob->fds.end(), std::back_inserter(*fds));
    halves_.push_back(half.take());
  }
  return Status::ok();
}

bool Endpoint::send_kick(void* self) {
  const ControlSocket& socket = static_cast<Endpoint*>(self)->socket_;
  // On a stream it might come into the middle of a message. Who sends kicks is on this host.
  if (socket.is_remote()) return false;
  return send_message(socket.fd(), wire::encode_kick(), {}).is_ok();
}

Status Endpoint::join_offers(const std::vector<wire::Offer>& offers, std::vector<OwnedFd> fds) {
  const auto transports = host_.transports();
  Status watched = watch_process();
  if (!watched.is_ok()) return watched;
  // The channels report arrivals with their way's address, and these need to know the peer.
  info_ = std::make_shared<const PeerInfo>(
      PeerInfo{peer_incarnation_, peer_name_, credentials_.pid, credentials_.uid,
               is_remote() ? remote_address(socket_.fd()) : ""});
  channels_.resize(transports.size());
  absent_.resize(transports.size());
  ways_.resize(transports.size());
  for (std::size_t i = 0; i < transports.size(); ++i) {
    absent_[i] = is_remote() && transports[i]->is_local() ? "the peer is on another host"
                                                          : "the peer does not have it";
    ways_[i] = {this, i};
  }
  bool has_one = false;
  std::string unreachable;
  std::size_t at = 0;
  for (const wire::Offer& offer : offers) {
    Result<std::vector<OwnedFd>> own = take_fds(fds, &at, offer.fd_count);
    if (!own.is_ok()) return own.status();
    for (std::size_t i = 0; i < transports.size(); ++i) {
      if (transports[i]->name() != offer.transport || channels_[i] || !halves_[i]) continue;
      Blob blob;
      blob.bytes = offer.bytes;
      blob.fds = own.take();
      // Taken, so that a peer that offers the same twice does not have it joined twice.
      const std::unique_ptr<ChannelHalf> half = std::move(halves_[i]);
      Result<std::unique_ptr<Channel>> channel = half->join(
          std::move(blob), {reinterpret_cast<std::uint64_t>(&ways_[i]), process(), send_kick, this});
      if (!channel.is_ok()) {
        // The peer comes to the same conclusion, and another transport may do.
        if (channel.status().code() != Code::kTransportUnavailable) return channel.status();
        absent_[i] = channel.status().text();
        unreachable += (unreachable.empty() ? "" : "; ") + absent_[i];
        break;
      }
      channels_[i] = channel.take();
      enforces_access_ |= transports[i]->enforces_access();
      has_one = true;
      break;
    }
  }
  halves_.clear();
  if (has_one) return Status::ok();
  if (!unreachable.empty()) return Status(Code::kTransportUnavailable, unreachable);
  std::string ours, theirs;
  for (const auto& transport : transports) {
    if (!is_remote() || !transport->is_local()) ours += " " + std::string(transport->name());
  }
  for (const wire::Offer& offer : offers) theirs += " " + offer.transport;
  return Status(Code::kTransportUnavailable,
                "no transport in common" + std::string(is_remote() ? " between two hosts" : "") +
                    ": here" + (ours.empty() ? " none" : ours) + ", at the peer" +
                    (theirs.empty() ? " none" : theirs) + "; `kvzc info` says what each host lacks");
}

void Endpoint::become_ready() {
  stage_ = Stage::kReady;
  door_.reset();
  is_ready_.store(true, std::memory_order_release);
  host_.endpoint_ready(*this);
  drain();  // Some may have come in already.
  if (first_) attach_queue_.push_back(std::exchange(first_, nullptr));
  for (auto& binding : std::exchange(to_attach_, {})) attach_queue_.push_back(std::move(binding));
  send_attaches();
}

// --- Grants and storages ---

void Endpoint::attach(std::shared_ptr<Binding> binding) {
  if (stage_ == Stage::kReady) {
    attach_queue_.push_back(std::move(binding));
    send_attaches();
  } else {
    to_attach_.push_back(std::move(binding));
  }
}

// As many at a time as the owner will answer without our reading.
void Endpoint::send_attaches() {
  while (!attach_queue_.empty() && attaching_.size() < kMostAttaching && !is_lost()) {
    const std::shared_ptr<Binding> binding = std::move(attach_queue_.front());
    attach_queue_.pop_front();
    const HandleInfo& info = binding->info();
    wire::Attach attach;
    attach.request = next_request_++;
    attach.grant_id = info.grant_id;
    attach.proof = wire::prove(info.key, kAttachRole, session_, info.grant_id);
    attaching_[attach.request] = binding;
    storages_due_ += info.storage_nbytes.size();
    send(wire::encode(attach));
  }
}

Status Endpoint::on_attach(const wire::Attach& attach) {
  wire::Attached answer;
  answer.request = attach.request;
  const std::shared_ptr<const GrantRecord> grant = host_.grants().find(attach.grant_id);
  std::shared_ptr<const RegionMemory> memory = grant ? grant->memory.lock() : nullptr;
  if (!memory) {
    answer.code = Code::kRevoked;
    answer.text = "the owner has revoked this grant, or closed its region; ask it for a new handle";
  } else if (!equal_in_constant_time(attach.proof,
                                     wire::prove(grant->key, kAttachRole, session_, grant->id))) {
    answer.code = Code::kBadHandle;
    answer.text = "the handle's key does not fit its grant: the handle is forged or damaged";
  } else if (!note_held(*grant)) {
    answer.code = Code::kRevoked;
    answer.text = "the owner has just revoked this grant; ask it for a new handle";
  } else {
    answer.proof = wire::prove(grant->key, kAttachedRole, session_, grant->id);
    answer.fence_slot = grant->fence.slot;
    answer.fence_epoch = grant->fence.epoch;
    // Where nothing can tell them apart, all grants of a storage share what was said of it.
    const Access access = enforces_access_ ? grant->access : Access::kBoth;
    for (const auto& storage : memory->storages) {
      const std::uint64_t id = shared_id(storage->id, access);
      answer.storages.push_back(id);
      if (!exported_.insert(id).second && incomplete_.erase(id) == 0) continue;
      Status sent = send_storage(*storage, access);
      if (sent.is_ok()) continue;
      exported_.erase(id);
      answer.code = sent.code();
      answer.text = "the owner could not share the memory: " + std::string(sent.text());
      break;
    }
  }
  // Let go before the peer hears: whoever closes the region after its put finds nobody else on it.
  memory.reset();
  send(wire::encode(answer));
  return Status::ok();
}

Status Endpoint::send_storage(const LocalStorage& storage, Access access) {
  wire::Storage message;
  message.id = shared_id(storage.id, access);
  message.nbytes = storage.nbytes;
  std::vector<OwnedFd> fds;
  const auto transports = host_.transports();
  for (std::size_t i = 0; i < transports.size(); ++i) {
    if (!channels_[i]) continue;
    wire::Road road;
    road.transport = transports[i]->name();
    Result<Blob> blob = transports[i]->describe(storage.piece(), access);
    if (blob.is_ok()) {
      road.bytes = std::move(blob->bytes);
      road.fd_count = static_cast<std::uint8_t>(blob->fds.size());
      std::move(blob->fds.begin(), blob->fds.end(), std::back_inserter(fds));
    } else {
      // The peer may reach it in another way, or later: what is short now may pass.
      road.code = blob.status().code();
      road.text = blob.status().text();
      if (road.code != Code::kTransportUnavailable) incomplete_.insert(message.id);
    }
    message.roads.push_back(std::move(road));
  }
  send(wire::encode(message), std::move(fds));
  return Status::ok();
}

Status Endpoint::on_storage(const wire::Storage& storage, std::vector<OwnedFd> fds) {
  const auto transports = host_.transports();
  // Memory comes in answer to attaches only, at most what the handles say: else whoever we write to could
  // have us map without end.
  if (storages_due_ == 0) {
    return Status(Code::kProtocol, peer_words() + " sent memory that nobody has asked for");
  }
  --storages_due_;
  Import import;
  import.nbytes = storage.nbytes;
  for (const auto& transport : transports) {
    import.roads.emplace_back(
        Status(Code::kTransportUnavailable,
               std::string(transport->name()) + ": the peer does not have it"));
  }
  std::size_t at = 0;
  for (const wire::Road& road : storage.roads) {
    Result<std::vector<OwnedFd>> own = take_fds(fds, &at, road.fd_count);
    if (!own.is_ok()) return own.status();
    for (std::size_t i = 0; i < transports.size(); ++i) {
      if (transports[i]->name() != road.transport || !channels_[i]) continue;
      if (road.code != Code::kOk) {
        import.roads[i] = Status(road.code, road.text);
        continue;
      }
      Blob blob;
      blob.bytes = road.bytes;
      blob.fds = own.take();
      import.roads[i] = transports[i]->import_memory(std::move(blob), storage.nbytes, process());
      break;
    }
  }
  imports_.insert_or_assign(storage.id, std::move(import));
  return Status::ok();
}

Status Endpoint::resolve(const wire::Attached& attached, const Binding& binding,
                         Binding::Resolved* out) {
  const HandleInfo& info = binding.info();
  if (attached.code != Code::kOk) return Status(attached.code, attached.text);
  if (!equal_in_constant_time(attached.proof,
                              wire::prove(info.key, kAttachedRole, session_, info.grant_id))) {
    return Status(Code::kBadHandle, "the peer did not prove that it knows the handle's key");
  }
  if (attached.storages.size() != info.storage_nbytes.size()) {
    return Status(Code::kBadHandle, "the handle and its owner disagree about the memory behind it");
  }
  std::vector<const Import*> imports;
  for (std::size_t i = 0; i < attached.storages.size(); ++i) {
    const auto found = imports_.find(attached.storages[i]);
    if (found == imports_.end() || found->second.nbytes != info.storage_nbytes[i]) {
      return Status(Code::kBadHandle,
                    "the handle and its owner disagree about the memory behind it");
    }
    imports.push_back(&found->second);
  }
  // The best transport that reaches all of it.
  std::string reasons;
  Code code = Code::kTransportUnavailable;
  const auto transports = host_.transports();
  for (std::size_t i = 0; i < transports.size(); ++i) {
    if (!channels_[i]) {
      out->passed_over.emplace_back(transports[i]->name(), absent_[i]);
      continue;
    }
    const auto missing = std::find_if(imports.begin(), imports.end(), [i](const Import* import) {
      return !import->roads[i].is_ok();
    });
    if (missing != imports.end()) {
      const Status& why = (*missing)->roads[i].status();
      if (!reasons.empty()) reasons += "; ";
      reasons += why.text();
      out->passed_over.emplace_back(transports[i]->name(), why.text());
      code = why.code();
      continue;
    }
    out->endpoint = shared_from_this();
    out->channel = channels_[i].get();
    out->transport = transports[i]->name();
    out->traffic = traffic_[i].get();
    for (const Import* import : imports) out->memories.push_back(*import->roads[i]);
    out->storage_ids = attached.storages;
    out->fence = {attached.fence_slot, attached.fence_epoch};
    return Status::ok();
  }
  return Status(code, reasons);
}

void Endpoint::on_attached(const wire::Attached& attached) {
  const auto found = attaching_.find(attached.request);
  if (found == attaching_.end()) return;
  const std::shared_ptr<Binding> binding = found->second;
  attaching_.erase(found);
  // Answers come in the order of the requests: of this one nothing more comes.
  storages_due_ = 0;
  for (const auto& [request, other] : attaching_) storages_due_ += other->info().storage_nbytes.size();
  auto resolved = std::make_shared<Binding::Resolved>();
  Status status = resolve(attached, *binding, resolved.get());
  if (status.is_ok()) {
    if (bound_.size() >= bound_sweep_) {
      std::erase_if(bound_, [](const auto& each) { return each.expired(); });
      bound_sweep_ = std::max<std::size_t>(64, 2 * bound_.size());
    }
    bound_.push_back(binding);
  }
  if (!status.is_ok()) resolved.reset();
  host_.binding_answered(*this, binding, std::move(status), std::move(resolved));
  send_attaches();
}

void Endpoint::release_storage(std::uint64_t storage) {
  for (const Access access : {Access::kPut, Access::kGet, Access::kBoth}) {
    const std::uint64_t id = shared_id(storage, access);
    incomplete_.erase(id);
    if (exported_.erase(id) == 0 || stage_ != Stage::kReady) continue;
    send(wire::encode(wire::Release{id}));
  }
}

void Endpoint::on_release(const wire::Release& release) {
  imports_.erase(release.storage);
  const Status why(Code::kRevoked,
                   "the owner has closed the region behind this handle; ask it for a new one");
  for (const auto& each : bound_) {
    const std::shared_ptr<Binding> binding = each.lock();
    if (!binding) continue;
    const auto resolved = binding->resolved();
    if (!resolved) continue;
    if (std::find(resolved->storage_ids.begin(), resolved->storage_ids.end(), release.storage) ==
        resolved->storage_ids.end()) {
      continue;
    }
    host_.binding_answered(*this, binding, why, nullptr);
  }
}

// --- Sending, and the end ---

void Endpoint::send(std::vector<std::byte> bytes, std::vector<OwnedFd> fds) {
  if (is_lost()) return;
  if (outgoing_.size() >= kMostOutgoing) {
    return lose(Status(Code::kProtocol, peer_words() + " asks without reading the answers"),
                PeerFate::kUnknown);
  }
  outgoing_.push_back({std::move(bytes), std::move(fds)});
  flush();
}

void Endpoint::flush() {
  while (!outgoing_.empty() && !is_lost()) {
    Status sent = socket_.send(outgoing_.front());
    if (sent.code() == Code::kWouldBlock) break;
    // What was received before the end still counts: it may say why. Reading finds the end.
    if (!sent.is_ok()) {
      outgoing_.clear();
      break;
    }
    outgoing_.pop_front();
  }
  if (wants_write_ == !outgoing_.empty() || is_lost()) return;
  wants_write_ = !wants_write_;
  host_.loop().change(socket_.fd(), wants_write_ ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

Status Endpoint::refuse(Code code, std::string text) {
  send(wire::encode(wire::Type::kRefuse, {code, text}));
  return Status(code, std::move(text));
}

void Endpoint::turn_away(const std::string& why) {
  lose(refuse(Code::kTimedOut, why), PeerFate::kUnknown);
}

void Endpoint::say_bye(const Status& why, PeerFate fate) {
  if (is_lost()) return;
  if (stop_writing(why, fate)) {
    send(wire::encode(wire::Type::kBye, {why.code(), std::string(why.text())}));
  }
  lose(why, fate);
}

bool Endpoint::stop_writing(const Status& why, PeerFate fate) {
  for (const auto& channel : channels_) {
    if (channel) channel->lose(why, fate);
  }
  // What had begun is a chunk per thread: tens of microseconds.
  const std::int64_t patience_ns = now_ns() + kSecondNs;
  const auto is_quiet = [this] {
    return std::all_of(channels_.begin(), channels_.end(),
                       [](const auto& channel) { return !channel || channel->is_quiet(); });
  };
  while (!is_quiet()) {
    if (now_ns() >= patience_ns) return false;
    cpu_relax();
  }
  return true;
}

void Endpoint::lose(Status why, PeerFate fate) {
  if (is_lost() || try_elsewhere(why)) return;
  // Tags that came before the end still count.
  if (is_ready()) drain();
  {
    const MutexLock lock(why_mutex_);
    why_ = why;
  }
  is_lost_.store(true, std::memory_order_release);
  const std::shared_ptr<Endpoint> self = shared_from_this();
  const bool is_quiet = stop_writing(why, fate);
  // The peer takes the end of the connection for the end of our writing, so that must be true. And
  // we wait for its end, unless it is known: until then it may still be writing.
  is_doubtful_ = fate == PeerFate::kUnknown && is_ready();
  // When a peer is told to be lost its bytes have stopped. One that runs is out within a chunk.
  if (is_doubtful_ && cut_channels(now_ns() + kCutPatienceNs).is_ok()) {
    is_doubtful_ = false;
    fate = PeerFate::kGone;
  }
  if (!is_doubtful_ && pidfd_.is_valid()) host_.loop().unwatch(pidfd_.get());
  if (socket_.is_valid() && is_quiet) {
    if (is_doubtful_) {
      ::shutdown(socket_.fd(), SHUT_WR);
      if (std::exchange(wants_write_, false)) host_.loop().change(socket_.fd(), EPOLLIN);
    } else {
      close_socket();
    }
  }
  outgoing_.clear();
  imports_.clear();
  std::vector<std::shared_ptr<Binding>> bindings;
  // What was refused is the grant that opened the connection; the others get another chance.
  const bool only_first = first_ && !to_attach_.empty() &&
                          (why.code() == Code::kRevoked || why.code() == Code::kBadHandle);
  std::vector<std::shared_ptr<Binding>> others = std::exchange(to_attach_, {});
  if (!only_first) std::move(others.begin(), others.end(), std::back_inserter(bindings));
  if (first_) bindings.push_back(std::exchange(first_, nullptr));
  for (auto& binding : std::exchange(attach_queue_, {})) bindings.push_back(std::move(binding));
  for (auto& [request, binding] : std::exchange(attaching_, {})) bindings.push_back(binding);
  for (const auto& each : std::exchange(bound_, {})) {
    if (auto binding = each.lock()) bindings.push_back(std::move(binding));
  }
  host_.endpoint_lost(*this, bindings, fate);
  if (is_doubtful_) settle_doubt(kFirstDoubtNs);
  if (only_first) {
    for (auto& binding : others) host_.start_binding(std::move(binding));
  }
}

}  // namespace kvzc

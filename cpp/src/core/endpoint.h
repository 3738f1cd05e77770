// Endpoint: the road to one peer. A control connection, a channel, and what the peer has shared.
//
// Its first error is its last. It lives on the control thread; the few things that other threads
// may touch say so.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/mutex.h"
#include "base/socket_list.h"
#include "base/unix_socket.h"
#include "core/binding.h"
#include "core/control_loop.h"
#include "core/control_socket.h"
#include "core/grant_table.h"
#include "core/traffic.h"
#include "core/wire.h"
#include "kvzc/engine.h"
#include "kvzc/transport.h"

namespace kvzc {

// What an endpoint needs of its engine.
class EndpointHost {
 public:
  virtual ~EndpointHost() = default;
  virtual const Incarnation& incarnation() const = 0;
  virtual const std::string& engine_name() const = 0;
  virtual GrantTable& grants() = 0;
  virtual ControlLoop& loop() = 0;
  virtual SocketList& sockets() = 0;
  virtual std::span<const std::unique_ptr<Transport>> transports() = 0;
  virtual bool is_allowed(std::uint32_t uid) const = 0;
  virtual const EngineOptions& options() const = 0;

  // --- Thread: control. ---

  // It has proved to be who it says; one that it had before, as far as is known here, is void.
  virtual void endpoint_returned(Endpoint& endpoint) = 0;
  // It can carry operations from now on.
  virtual void endpoint_ready(Endpoint& endpoint) = 0;
  // It never will again; `bindings` are those that used it or waited for it.
  virtual void endpoint_lost(Endpoint& endpoint, std::span<const std::shared_ptr<Binding>> bindings,
                             PeerFate fate) = 0;
  // One that was lost without being gone is gone now.
  virtual void endpoint_gone(Endpoint& endpoint) = 0;
  // Finds or makes a road for a grant.
  virtual void start_binding(std::shared_ptr<Binding> binding) = 0;
  // The owner's answer about a grant: how to use it, or why it cannot be used (any more).
  virtual void binding_answered(Endpoint& endpoint, const std::shared_ptr<Binding>& binding,
                                Status status,
                                std::shared_ptr<const Binding::Resolved> resolved) = 0;
};

class Endpoint : public std::enable_shared_from_this<Endpoint> {
 public:
  Endpoint(EndpointHost& host, std::int64_t handshake_deadline_ns);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // --- Thread: any. ---

  bool is_lost() const { return is_lost_.load(std::memory_order_acquire); }
  // Gives why it was lost. Requires: is_lost().
  Status why() const;
  // Requires: is_ready() was seen.
  const std::shared_ptr<const PeerInfo>& info() const { return info_; }
  bool is_ready() const { return is_ready_.load(std::memory_order_acquire); }
  void drain();
  // Says which way a tag came; what a channel reports with, and good as long as the endpoint.
  struct Way {
    Endpoint* endpoint = nullptr;
    std::size_t transport = 0;
  };
  void grant_credits(std::size_t transport, std::uint32_t count);
  // As the methods of the channels, for all of them. Requires: is_ready() was seen.
  void look();
  void begin_rest();
  void end_rest();
  // Returns when the peer is no longer within any of the grants. Errors: kTimedOut naming the peer.
  Status fence(std::span<const FenceTicket> grants, std::int64_t deadline_ns);
  // Ends the connection without the peer's help, and returns when it can touch nothing any more.
  // Errors: kTimedOut, kUnsupported naming the peer; it is lost all the same.
  Status cut_off(const Status& why, std::int64_t deadline_ns);
  // Gives the channel that tags go by. Requires: is_ready() was seen.
  Channel* tag_channel() const;
  const char* tag_transport() const;
  // Looks whether a channel has found out by itself that it is lost; if so, all is. Thread: any.
  void look_at_channels();

  // Counts what goes with tags alone. Requires: is_ready() was seen.
  PeerTraffic& tag_traffic() const;

  // --- Thread: control. ---

  // Before it is ready.
  void count_in(std::vector<std::shared_ptr<PeerTraffic>> traffic) { traffic_ = std::move(traffic); }
  // By the transports of this engine.
  bool has_channel(std::size_t transport) const { return channels_[transport] != nullptr; }
  // Begins to reach the peer that `first` names; its grant's key opens the door.
  void connect(std::shared_ptr<Binding> first);
  // Takes over a connection that was accepted.
  void accept(ControlSocket socket);
  // Asks for a grant's storages, now or once ready; the binding hears of it.
  void attach(std::shared_ptr<Binding> binding);
  // Tells the peer that a storage is gone, if it knew of it.
  void release_storage(std::uint64_t storage);
  // Says goodbye and closes.
  void say_bye(const Status& why, PeerFate fate);
  void lose(Status why, PeerFate fate);
  // Refuses whoever is at the other end, before the handshake has ended.
  void turn_away(const std::string& why);
  std::int64_t handshake_deadline_ns() const { return handshake_deadline_ns_; }
  // Whom it is meant to reach, or was reached by. Requires: the handshake has got that far.
  const Incarnation& peer_incarnation() const { return peer_incarnation_; }
  // Says whether its process has exited or its engine has closed, for all that is known.
  bool has_peer_ended() const { return has_peer_ended_; }
  bool is_server() const { return is_server_; }
  // Says whether somebody has answered at every address that was tried; the peer may be at another.
  bool have_all_answered() const { return have_all_answered_; }
  // Says whether it is reached over a network, which may come back.
  bool is_remote() const { return socket_.is_remote(); }

 private:
  enum class Stage {
    kNew,
    kConnecting,
    kAwaitChallenge,
    kAwaitWelcome,
    kAwaitHello,
    kAwaitProof,
    kReady
  };
  struct Import {
    std::uint64_t nbytes = 0;
    // One per transport of this engine: the memory, or why it cannot be reached that way.
    std::vector<Result<std::shared_ptr<RemoteMemory>>> roads;
  };

  // Tries the address at address_at_ of the handle.
  void try_connect();
  void connect_on_host(const std::string& address);
  void connect_to_host(const std::string& address);
  void next_address(Status why);
  // Who answered may be another than was meant: addresses such as a bridge's are on many hosts. Gives
  // whether the next one is tried.
  bool try_elsewhere(const Status& why);
  void drop_connection();
  void say_hello();
  Status watch_socket();
  void on_events(std::uint32_t events);
  void on_message(Message message);
  // Notes that the peer holds a grant, so that a fence asks it; gives whether the grant still holds.
  bool note_held(const GrantRecord& grant);
  // The kernel says that the peer's process has exited.
  void on_exit();
  // Nothing of the peer is left, and nothing it said is unread.
  void peer_has_exited();
  void on_end_of_connection(const Status& how);
  // Reads on until the lost peer has let go of the connection too.
  void read_to_the_end();
  // Looks, again and again, whether a lost peer has come to rest.
  void settle_doubt(std::int64_t pause_ns);
  void become_gone();
  Status cut_channels(std::int64_t deadline_ns);
  Status watch_process();
  static bool send_kick(void* self);
  PeerProcess process() const { return {credentials_.pid, credentials_.uid, pidfd_.get()}; }
  void close_socket();
  Status handle(wire::Type type, std::span<const std::byte> body, std::vector<OwnedFd> fds);

  Status on_hello(const wire::Hello& hello);
  Status on_challenge(const wire::Challenge& challenge);
  Status on_proof(const wire::Proof& proof, std::vector<OwnedFd> fds);
  Status on_welcome(const wire::Welcome& welcome, std::vector<OwnedFd> fds);
  Status on_attach(const wire::Attach& attach);
  Status on_storage(const wire::Storage& storage, std::vector<OwnedFd> fds);
  void on_attached(const wire::Attached& attached);
  void on_release(const wire::Release& release);

  // Lets no further copy begin; gives whether all that had begun are over.
  bool stop_writing(const Status& why, PeerFate fate);
  Status make_offers(std::vector<wire::Offer>* offers, std::vector<OwnedFd>* fds);
  Status join_offers(const std::vector<wire::Offer>& offers, std::vector<OwnedFd> fds);
  void become_ready();
  void send_attaches();
  Status send_storage(const LocalStorage& storage, Access access);
  Status resolve(const wire::Attached& attached, const Binding& binding, Binding::Resolved* out);
  void send(std::vector<std::byte> bytes, std::vector<OwnedFd> fds = {});
  void flush();
  // Sends a refusal and loses the connection with the same words.
  Status refuse(Code code, std::string text);
  // What both sides must know besides a grant's key; empty on one host.
  std::string_view secret() const;
  std::string peer_words() const;

  std::vector<std::shared_ptr<PeerTraffic>> traffic_;  // By transport, null where there is no channel.
  EndpointHost& host_;
  const std::int64_t handshake_deadline_ns_;

  // Read by other threads once the flags say so.
  std::atomic<bool> is_ready_{false};
  std::atomic<bool> is_lost_{false};
  mutable Mutex why_mutex_;
  Status why_ KVZC_GUARDED_BY(why_mutex_);
  std::shared_ptr<const PeerInfo> info_;
  // One per transport of this engine; null where the peer lacks it. Constant once ready.
  std::vector<std::unique_ptr<Channel>> channels_;
  std::vector<Way> ways_;            // The same.
  std::vector<std::string> absent_;  // Why a channel is null.

  // Control thread only.
  Stage stage_ = Stage::kNew;
  bool is_server_ = false;
  ControlSocket socket_;  // Constant once ready.
  std::size_t address_at_ = 0;
  Status unreached_;  // Why the addresses before it did not do.
  bool have_all_answered_ = true;
  OwnedFd pidfd_;  // Constant once ready.
  bool wants_write_ = false;
  bool has_peer_ended_ = false;
  bool is_socket_closed_ = false;
  bool is_doubtful_ = false;  // Lost, but perhaps still writing.
  std::deque<Message> outgoing_;
  PeerCredentials credentials_;
  Incarnation peer_incarnation_{};
  std::string peer_name_;
  wire::Hello hello_;
  Digest session_{};
  std::shared_ptr<const GrantRecord> door_;  // As server: the grant that opened the connection.
  std::vector<std::unique_ptr<ChannelHalf>> halves_;
  std::shared_ptr<Binding> first_;
  std::vector<std::shared_ptr<Binding>> to_attach_;
  std::deque<std::shared_ptr<Binding>> attach_queue_;
  std::unordered_map<std::uint32_t, std::shared_ptr<Binding>> attaching_;
  std::uint64_t storages_due_ = 0;  // So many, at most, may come in answer to those.
  std::uint32_t next_request_ = 1;
  std::unordered_map<std::uint64_t, Import> imports_;
  std::vector<std::weak_ptr<Binding>> bound_;
  std::size_t bound_sweep_ = 64;
  bool enforces_access_ = false;  // One of the channels' transports does.
  std::unordered_set<std::uint64_t> exported_;  // By shared_id().
  std::unordered_set<std::uint64_t> incomplete_;  // Of these, what is to be told anew when asked.
  Mutex held_mutex_;
  // The grants that the peer was let into, slot to epoch. Guarded by held_mutex_.
  std::unordered_map<std::uint32_t, std::uint64_t> held_ KVZC_GUARDED_BY(held_mutex_);
};

}  // namespace kvzc

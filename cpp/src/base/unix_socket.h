// Sequenced-packet Unix sockets in the abstract namespace: message boundaries, descriptors, and the
// kernel's word for who is at the other end. Abstract names vanish with their process.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "kvzc/status.h"

namespace kvzc {

inline constexpr std::size_t kMaxMessageBytes = 64u << 10;
inline constexpr std::size_t kMaxMessageFds = 32;

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};

// All sockets are non-blocking and closed on exec.

// Errors: kInvalidArgument when the name is in use or too long.
Result<OwnedFd> listen_at(const std::string& name);
// Errors: kPeerLost when nobody listens there; kWouldBlock when the listener's queue is full.
Result<OwnedFd> connect_to(const std::string& name);
// Gives an invalid descriptor when nobody is waiting.
Result<OwnedFd> accept_from(int listener);
Result<PeerCredentials> peer_credentials(int socket);

struct Message {
  std::vector<std::byte> bytes;
  std::vector<OwnedFd> fds;
};

// Errors: kWouldBlock when the socket is full; kPeerLost when the other end is gone.
Status send_message(int socket, std::span<const std::byte> bytes, std::span<const OwnedFd> fds);
// Errors: kWouldBlock when nothing is there; kPeerLost at the end; kProtocol for an oversized
// message; kLimitExceeded when its descriptors do not fit into this process's limit.
Result<Message> receive_message(int socket);

}  // namespace kvzc

// ControlSocket: one end of a control connection; whole messages go both ways. On one host a Unix
// socket, which knows who is at the other end and carries descriptors; between hosts TCP.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/unix_socket.h"
#include "kvzc/status.h"

namespace kvzc {

class ControlSocket {
 public:
  enum class Kind { kUnix, kTcp };

  ControlSocket() = default;
  ControlSocket(Kind kind, OwnedFd fd) : kind_(kind), fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  bool is_valid() const { return fd_.is_valid(); }
  bool is_remote() const { return kind_ == Kind::kTcp; }

  // Sends a message, or goes on with it. Errors: kWouldBlock, and the same message must be given
  // again before any other; kPeerLost when the other end is gone.
  Status send(const Message& message);
  // Errors: kWouldBlock when no whole message is there; kPeerLost at the end; kTimedOut when the
  // other host is silent; kProtocol for what is no message.
  Result<Message> receive();

 private:
  Status send_on_stream(const Message& message);
  Result<Message> receive_on_stream();

  Kind kind_ = Kind::kUnix;
  OwnedFd fd_;
  std::size_t sent_ = 0;            // Bytes of the message that send() is at.
  std::vector<std::byte> partial_;  // The beginning of the message that comes in.
  std::size_t received_ = 0;        // So much of it is there.
};

}  // namespace kvzc

#include "core/control_socket.h"

#include <errno.h>
#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "core/wire.h"

namespace kvzc {
namespace {

Status ended(int error) {
  switch (error) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
      return Status(Code::kTimedOut, "its host does not answer any more");
    case 0:
    case ECONNRESET:
    case EPIPE:
    case ENOTCONN:
      return Status(Code::kPeerLost, "its connection has ended: its process has exited or was killed");
    default:
      return Status::system(error, "the control connection");
  }
}

}  // namespace

Status ControlSocket::send(const Message& message) {
  if (kind_ == Kind::kTcp) return send_on_stream(message);
  return send_message(fd_.get(), message.bytes, message.fds);
}

Result<Message> ControlSocket::receive() {
  return kind_ == Kind::kTcp ? receive_on_stream() : receive_message(fd_.get());
}

Status ControlSocket::send_on_stream(const Message& message) {
  while (sent_ < message.bytes.size()) {
    const ssize_t sent = ::send(fd_.get(), message.bytes.data() + sent_, message.bytes.size() - sent_,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      sent_ += static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == ENOBUFS) {
      return Status(Code::kWouldBlock, "the control socket is full");
    } else if (errno != EINTR) {
      return ended(errno);
    }
  }
  sent_ = 0;
  return Status::ok();
}

// Reads no further than to the end of one message, so that the descriptor stays readable while
// there is another.
Result<Message> ControlSocket::receive_on_stream() {
  if (partial_.empty()) partial_.resize(wire::kHeaderBytes);
  for (;;) {
    while (received_ < partial_.size()) {
      const ssize_t got =
          recv(fd_.get(), partial_.data() + received_, partial_.size() - received_, MSG_DONTWAIT);
      if (got > 0) {
        received_ += static_cast<std::size_t>(got);
      } else if (got == 0) {
        return ended(0);
      } else if (errno == EAGAIN) {
        return Status(Code::kWouldBlock, "nothing to receive");
      } else if (errno != EINTR) {
        return ended(errno);
      }
    }
    const std::uint32_t nbytes = wire::message_bytes(partial_);
    if (nbytes < wire::kHeaderBytes || nbytes > kMaxMessageBytes) {
      return Status(Code::kProtocol, "the peer does not speak kvzc's control protocol");
    }
    if (received_ == nbytes) break;
    partial_.resize(nbytes);
  }
  Message out;
  out.bytes = std::exchange(partial_, {});
  received_ = 0;
  return out;
}

}  // namespace kvzc

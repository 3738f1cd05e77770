#include "base/unix_socket.h"

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstring>
#include <utility>

namespace kvzc {
namespace {

constexpr int kBacklog = 128;

struct Address {
  sockaddr_un socket{};
  socklen_t length = 0;
};

Result<Address> abstract_address(const std::string& name) {
  Address out;
  out.socket.sun_family = AF_UNIX;
  // The first byte is zero: a name in the abstract namespace, not in the file system.
  if (name.empty() || name.size() > sizeof(out.socket.sun_path) - 1) {
    return Status(Code::kInvalidArgument,
                  "the engine name makes a socket name of " + std::to_string(name.size()) +
                      " bytes; 1 to " + std::to_string(sizeof(out.socket.sun_path) - 1) + " fit");
  }
  std::memcpy(out.socket.sun_path + 1, name.data(), name.size());
  out.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return out;
}

Result<OwnedFd> make_socket() {
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.is_valid()) return fd;
  if (errno == EMFILE || errno == ENFILE) return too_many_files("making a connection");
  return Status::system(errno, "socket");
}

}  // namespace

Result<OwnedFd> listen_at(const std::string& name) {
  Result<Address> address = abstract_address(name);
  if (!address.is_ok()) return address.status();
  Result<OwnedFd> fd = make_socket();
  if (!fd.is_ok()) return fd;
  if (bind(fd->get(), reinterpret_cast<sockaddr*>(&address->socket), address->length) != 0) {
    if (errno == EADDRINUSE) {
      return Status(Code::kInvalidArgument, "an engine of this name runs already on this host ('" +
                                                name + "'); give this one another name, or none");
    }
    return Status::system(errno, "bind of the control socket");
  }
  if (listen(fd->get(), kBacklog) != 0) return Status::system(errno, "listen");
  return fd;
}

Result<OwnedFd> connect_to(const std::string& name) {
  Result<Address> address = abstract_address(name);
  if (!address.is_ok()) return address.status();
  Result<OwnedFd> fd = make_socket();
  if (!fd.is_ok()) return fd;
  if (connect(fd->get(), reinterpret_cast<sockaddr*>(&address->socket), address->length) == 0) {
    return fd;
  }
  switch (errno) {
    case EAGAIN:
      return Status(Code::kWouldBlock, "the peer's queue of connections is full");
    case ECONNREFUSED:
      return Status(Code::kPeerLost,
                    "no engine listens at '" + name +
                        "' on this host: it has closed or its process has exited, or it runs in "
                        "another network namespace");
    default:
      return Status::system(errno, "connect");
  }
}

Result<OwnedFd> accept_from(int listener) {
  OwnedFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.is_valid() || errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return fd;
  return Status::system(errno, "accept");
}

Result<PeerCredentials> peer_credentials(int socket) {
  ucred credentials;
  socklen_t length = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return Status::system(errno, "reading the peer's credentials");
  }
  return PeerCredentials{credentials.pid, credentials.uid};
}

Status send_message(int socket, std::span<const std::byte> bytes, std::span<const OwnedFd> fds) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxMessageFds * sizeof(int))> control{};
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    if (fds.size() > kMaxMessageFds) {
      return Status(Code::kProtocol, "too many descriptors for one message");
    }
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    for (std::size_t i = 0; i < fds.size(); ++i) {
      const int fd = fds[i].get();
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &fd, sizeof fd);
    }
  }
  while (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:
      case ENOBUFS:
      case ETOOMANYREFS:  // Too many descriptors on their way; the peer will take some.
        return Status(Code::kWouldBlock, "the control socket is full");
      case EPIPE:
      case ECONNRESET:
      case ENOTCONN:
        return Status(Code::kPeerLost, "the peer closed its control connection");
      default:
        return Status::system(errno, "sendmsg");
    }
  }
  return Status::ok();
}

Result<Message> receive_message(int socket) {
  std::array<std::byte, kMaxMessageBytes> buffer;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxMessageFds * sizeof(int))> control;
  iovec part{buffer.data(), buffer.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got;
  // A peer that closed with something of ours unread resets the connection. That is told first, and
  // once; what the peer had said before, such as why it refuses, comes after it.
  bool was_reset = false;
  while ((got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0 &&
         (errno == EINTR || (errno == ECONNRESET && !std::exchange(was_reset, true)))) {
  }
  if (got < 0) {
    if (errno == EAGAIN) return Status(Code::kWouldBlock, "nothing to receive");
    if (errno == ECONNRESET) return Status(Code::kPeerLost, "the peer's engine is gone");
    return Status::system(errno, "recvmsg");
  }
  Message out;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      out.fds.emplace_back(fd);
    }
  }
  // An empty message is never sent: this is the end of the connection.
  if (got == 0) return Status(Code::kPeerLost, "the peer's engine is gone");
  if ((message.msg_flags & MSG_TRUNC) != 0) {
    return Status(Code::kProtocol, "the peer sent a message larger than 64 KiB");
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return Status(Code::kLimitExceeded,
                  "descriptors from a peer do not fit into this process's limit; raise it "
                  "(ulimit -n)");
  }
  out.bytes.assign(buffer.begin(), buffer.begin() + got);
  return out;
}

}  // namespace kvzc

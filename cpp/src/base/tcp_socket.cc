#include "base/tcp_socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>

namespace kvzc {
namespace {

constexpr int kBacklog = 128;

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

std::string text_of(const Address& address) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(address.get(), address.length, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  const bool is_v6 = address.family() == AF_INET6;
  return (is_v6 ? "[" : "") + std::string(host) + (is_v6 ? "]:" : ":") + port;
}

Result<std::vector<Address>> resolve(const std::string& host_and_port, int flags) {
  const Status malformed(Code::kInvalidArgument,
                         "'" + host_and_port +
                             "' is no address of the form host:port, for example 10.0.0.1:7000 or "
                             "[fd00::1]:7000");
  const std::size_t colon = host_and_port.rfind(':');
  if (colon == std::string::npos || colon == 0) return malformed;
  std::string host = host_and_port.substr(0, colon);
  const std::string port = host_and_port.substr(colon + 1);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    return malformed;
  }
  const bool is_number = !port.empty() && port.size() <= 5 &&
                         std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number || std::stoi(port) > 65535) return malformed;
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &list); error != 0) {
    return Status(Code::kInvalidArgument, "'" + host_and_port + "': " + gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> keep(list, freeaddrinfo);
  std::vector<Address> out;
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    if (each->ai_addrlen > sizeof(sockaddr_storage)) continue;
    Address& address = out.emplace_back();
    std::memcpy(&address.storage, each->ai_addr, each->ai_addrlen);
    address.length = each->ai_addrlen;
  }
  if (out.empty()) return malformed;
  return out;
}

Result<Address> numeric(const std::string& text) {
  Result<std::vector<Address>> found = resolve(text, AI_NUMERICHOST);
  if (!found.is_ok()) return found.status();
  return found->front();
}

Result<OwnedFd> make_socket(int family) {
  OwnedFd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.is_valid()) return fd;
  if (errno == EMFILE || errno == ENFILE) return too_many_files("making a connection");
  return Status::system(errno, "socket");
}

void set(int socket, int level, int option, int value) {
  (void)setsockopt(socket, level, option, &value, sizeof value);
}

bool is_any(const Address& address) {
  if (address.family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr.s_addr == INADDR_ANY;
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr);
}

// Says whether others can use it without being told an interface.
bool is_global(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const in_addr_t host = ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr);
    return host >> 24 != 127 && host >> 16 != 0xA9FE;
  }
  const in6_addr& host = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  return !IN6_IS_ADDR_LOOPBACK(&host) && !IN6_IS_ADDR_LINKLOCAL(&host);
}

Status lost(const std::string& address, int error) {
  switch (error) {
    case ECONNREFUSED:
      return Status(Code::kPeerLost, "nobody listens at " + address +
                                         ": its engine has closed, its process has exited, or it "
                                         "listens at another address");
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
      return Status(Code::kPeerLost, "there is no way to " + address + " (" + std::strerror(error) +
                                         "): its host is down, a firewall is between, or the "
                                         "address is not one that this host can reach; name one in "
                                         "the owner's Engine(advertise=...)");
    default:
      return Status(Code::kPeerLost, "connecting to " + address + ": " + std::strerror(error));
  }
}

std::string name_of(int socket, int (*get)(int, sockaddr*, socklen_t*)) {
  Address address;
  address.length = sizeof address.storage;
  if (get(socket, address.get(), &address.length) != 0) return "an unknown address";
  return text_of(address);
}

}  // namespace

Result<std::vector<std::string>> look_up(const std::string& host_and_port) {
  Result<std::vector<Address>> found = resolve(host_and_port, 0);
  if (!found.is_ok()) return found.status();
  std::vector<std::string> out;
  for (const Address& address : *found) out.push_back(text_of(address));
  return out;
}

std::vector<std::string> reachable_addresses(const std::string& bound) {
  const Result<Address> own = numeric(bound);
  if (!own.is_ok() || !is_any(*own)) return {bound};
  const std::string port = bound.substr(bound.rfind(':'));
  std::vector<std::string> out;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return out;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> keep(list, freeifaddrs);
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    const int family = each->ifa_addr->sa_family;
    // What is bound to all of IPv6 takes IPv4 too, see listen_tcp().
    if (family != AF_INET && !(family == AF_INET6 && own->family() == AF_INET6)) continue;
    if (!is_global(each->ifa_addr)) continue;
    char host[NI_MAXHOST];
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(each->ifa_addr, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) {
      continue;
    }
    out.push_back(family == AF_INET ? host + port : "[" + std::string(host) + "]" + port);
  }
  return out;
}

Result<OwnedFd> listen_tcp(const std::string& address) {
  const Result<Address> own = numeric(address);
  if (!own.is_ok()) return own.status();
  Result<OwnedFd> fd = make_socket(own->family());
  if (!fd.is_ok()) return fd;
  // A restarted engine takes its port back while old connections linger.
  set(fd->get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (own->family() == AF_INET6) set(fd->get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(fd->get(), own->get(), own->length) != 0 || listen(fd->get(), kBacklog) != 0) {
    const int error = errno;
    if (error == EADDRINUSE) {
      return Status(Code::kInvalidArgument, "another program listens at " + address +
                                                " already; choose another port, or 0 for any");
    }
    if (error == EADDRNOTAVAIL) {
      return Status(Code::kInvalidArgument,
                    address + " is no address of this host; listen at one of its own, or at 0.0.0.0 "
                              "and name the outer one in advertise=");
    }
    if (error == EACCES) {
      return Status(Code::kInvalidArgument, "this user may not listen at " + address +
                                                "; ports from 1024 on are open to all");
    }
    return Status::system(error, "listening at " + address);
  }
  return fd;
}

Result<OwnedFd> begin_connect_tcp(const std::string& address) {
  const Result<Address> other = numeric(address);
  if (!other.is_ok()) return Status(Code::kPeerLost, std::string(other.status().text()));
  Result<OwnedFd> fd = make_socket(other->family());
  if (!fd.is_ok()) return fd;
  set(fd->get(), IPPROTO_TCP, TCP_NODELAY, 1);
  while (connect(fd->get(), other->get(), other->length) != 0) {
    if (errno == EINPROGRESS) break;
    if (errno != EINTR) return lost(address, errno);
  }
  return fd;
}

Status connect_result(int socket, const std::string& address) {
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  return error == 0 ? Status::ok() : lost(address, error);
}

Result<OwnedFd> accept_tcp(int listener) {
  OwnedFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.is_valid()) {
    set(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
    return fd;
  }
  // What befell one connection before it was taken is not the listener's.
  switch (errno) {
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
      return Status::system(errno, "accept");
    default:
      return fd;
  }
}

std::string local_address(int socket) { return name_of(socket, getsockname); }
std::string remote_address(int socket) { return name_of(socket, getpeername); }

void detect_silence(int socket, int seconds) {
  // Probes go out when nothing else does. The kernel looks at the time-out when it sends one, so the
  // last comes just before.
  const int pause = std::max(1, seconds / 5);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, pause);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, pause);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, std::max(1, seconds / pause - 1));
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, (seconds - pause) * 1000);
}

}  // namespace kvzc

// TCP sockets for control connections between hosts. Addresses are numeric texts, "10.0.0.1:7000" or
// "[fd00::1]:7000"; names are looked up once, when an engine is made.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "kvzc/status.h"

namespace kvzc {

// Gives the numeric addresses that "host:port" stands for. Errors: kInvalidArgument. Cost: may ask a
// name server.
Result<std::vector<std::string>> look_up(const std::string& host_and_port);
// Gives those of this host at which others can reach a listener bound to `bound`: itself, or, where
// it is bound to all of them, every one but loopback and link-local ones.
std::vector<std::string> reachable_addresses(const std::string& bound);

// All sockets are non-blocking, closed on exec, without Nagle's delay.

// Errors: kInvalidArgument when the address is in use or not this host's.
Result<OwnedFd> listen_tcp(const std::string& address);
// Begins to connect; the socket becomes writable at the end of it, and connect_result() says how it
// went. Errors: kPeerLost.
Result<OwnedFd> begin_connect_tcp(const std::string& address);
// Errors: kPeerLost with the reason.
Status connect_result(int socket, const std::string& address);
// Gives an invalid descriptor when nobody is waiting.
Result<OwnedFd> accept_tcp(int listener);
// Gives the address at this end, or at the other.
std::string local_address(int socket);
std::string remote_address(int socket);
// From now on a host that answers nothing for so long ends the connection. The kernels see to it: a
// process that is busy or stopped still answers, as long as what it does not read fits into its
// socket. Whole seconds, at least 2.
void detect_silence(int socket, int seconds);

}  // namespace kvzc

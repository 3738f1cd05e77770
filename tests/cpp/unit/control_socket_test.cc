// Control connections: whole messages over a stream, and the addresses that engines listen at.
#include "core/control_socket.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "base/tcp_socket.h"
#include "core/wire.h"
#include "unit_support.h"

namespace kvzc {
namespace {

struct Pair {
  ControlSocket ours;
  OwnedFd theirs;
};

Pair make_stream() {
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
  return {ControlSocket(ControlSocket::Kind::kTcp, OwnedFd(fds[0])), OwnedFd(fds[1])};
}

void write_all(const OwnedFd& to, std::span<const std::byte> bytes) {
  ASSERT_EQ(send(to.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
}

std::vector<std::byte> some_message(std::string text) {
  return wire::encode(wire::Type::kBye, {Code::kClosed, std::move(text)});
}

TEST(ControlSocketTest, AMessageThatComesByteByByteIsWholeWithItsLast) {
  Pair pair = make_stream();
  const std::vector<std::byte> message = some_message("a goodbye");
  for (const std::byte& each : message) {
    EXPECT_EQ(pair.ours.receive().status().code(), Code::kWouldBlock);
    write_all(pair.theirs, {&each, 1});
  }
  Result<Message> got = pair.ours.receive();
  ASSERT_TRUE(got.is_ok()) << got.status().to_string();
  EXPECT_EQ(got->bytes, message);
  EXPECT_EQ(pair.ours.receive().status().code(), Code::kWouldBlock);
}

TEST(ControlSocketTest, MessagesThatComeAtOnceAreTakenOneByOne) {
  Pair pair = make_stream();
  std::vector<std::byte> both = some_message("one"), second = some_message("the other");
  both.insert(both.end(), second.begin(), second.end());
  write_all(pair.theirs, both);
  EXPECT_EQ(pair.ours.receive()->bytes, some_message("one"));
  // What is left still makes the descriptor readable.
  pollfd look{pair.ours.fd(), POLLIN, 0};
  EXPECT_EQ(poll(&look, 1, 0), 1);
  EXPECT_EQ(pair.ours.receive()->bytes, second);
}

TEST(ControlSocketTest, ALengthThatNoMessageHasIsRefusedAtItsHeader) {
  for (const std::uint32_t nbytes : {0u, 7u, 65537u, 0xffffffffu}) {
    Pair pair = make_stream();
    std::byte header[8] = {};
    std::memcpy(header + 4, &nbytes, sizeof nbytes);
    write_all(pair.theirs, header);
    EXPECT_EQ(pair.ours.receive().status().code(), Code::kProtocol) << nbytes;
  }
}

TEST(ControlSocketTest, AMessageOfTheHeaderAloneAndTheLongestOnePass) {
  Pair pair = make_stream();
  write_all(pair.theirs, wire::encode_kick());
  EXPECT_EQ(pair.ours.receive()->bytes, wire::encode_kick());
  std::vector<std::byte> longest(kMaxMessageBytes, std::byte{5});
  const std::uint32_t nbytes = kMaxMessageBytes;
  std::memcpy(longest.data() + 4, &nbytes, sizeof nbytes);
  write_all(pair.theirs, longest);
  Result<Message> got = pair.ours.receive();
  ASSERT_TRUE(got.is_ok()) << got.status().to_string();
  EXPECT_EQ(got->bytes, longest);
}

TEST(ControlSocketTest, AnEndInTheMiddleOfAMessageIsTheEnd) {
  Pair pair = make_stream();
  const std::vector<std::byte> message = some_message("cut");
  write_all(pair.theirs, std::span(message).first(10));
  pair.theirs.reset();
  EXPECT_EQ(pair.ours.receive().status().code(), Code::kPeerLost);
}

TEST(ControlSocketTest, ASendThatMeetsAFullSocketGoesOnWhereItStopped) {
  Pair pair = make_stream();
  Message message;
  message.bytes = std::vector<std::byte>(kMaxMessageBytes, std::byte{9});
  const std::uint32_t nbytes = kMaxMessageBytes;
  std::memcpy(message.bytes.data() + 4, &nbytes, sizeof nbytes);
  ControlSocket reader(ControlSocket::Kind::kTcp, std::move(pair.theirs));
  int sent = 0, received = 0;
  bool was_full = false;
  while (received < 40) {
    if (sent < 40) {
      const Status status = pair.ours.send(message);
      if (status.is_ok()) {
        ++sent;
        continue;
      }
      ASSERT_EQ(status.code(), Code::kWouldBlock) << status.to_string();
      was_full = true;
    }
    Result<Message> got = reader.receive();
    if (got.status().code() == Code::kWouldBlock) continue;
    ASSERT_TRUE(got.is_ok()) << got.status().to_string();
    ASSERT_EQ(got->bytes, message.bytes);
    ++received;
  }
  EXPECT_TRUE(was_full);
}

TEST(TcpSocketTest, WhatIsNoAddressIsRefusedWithAnExample) {
  for (const char* text : {"", "7000", ":7000", "10.0.0.1", "10.0.0.1:", "10.0.0.1:70000",
                           "10.0.0.1:-1", "10.0.0.1:http", "fd00::1:7000", "[fd00::1]"}) {
    const Status status = look_up(text).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << text;
  }
  EXPECT_NE(look_up("7000").status().text().find("10.0.0.1:7000"), std::string_view::npos);
  EXPECT_EQ(*look_up("127.0.0.1:80"), std::vector<std::string>{"127.0.0.1:80"});
  EXPECT_EQ(*look_up("[::1]:80"), std::vector<std::string>{"[::1]:80"});
}

TEST(TcpSocketTest, APortIsFoundAndHeldAndTakenBack) {
  OwnedFd listener = listen_tcp("127.0.0.1:0").take();
  const std::string address = local_address(listener.get());
  EXPECT_EQ(listen_tcp(address).status().code(), Code::kInvalidArgument);
  OwnedFd ours = begin_connect_tcp(address).take();
  pollfd wait{ours.get(), POLLOUT, 0};
  ASSERT_EQ(poll(&wait, 1, 10'000), 1);
  EXPECT_TRUE(connect_result(ours.get(), address).is_ok());
  OwnedFd theirs = accept_tcp(listener.get()).take();
  ASSERT_TRUE(theirs.is_valid());
  EXPECT_EQ(remote_address(theirs.get()), local_address(ours.get()));
  // Its connections do not keep the port from an engine that starts again.
  listener.reset();
  EXPECT_TRUE(listen_tcp(address).is_ok());
}

TEST(TcpSocketTest, WhereNobodyListensTheReasonIsTold) {
  std::string address;
  {
    const OwnedFd listener = listen_tcp("127.0.0.1:0").take();
    address = local_address(listener.get());
  }
  Result<OwnedFd> socket = begin_connect_tcp(address);
  Status status = socket.status();
  if (socket.is_ok()) {
    pollfd wait{socket->get(), POLLOUT, 0};
    ASSERT_EQ(poll(&wait, 1, 10'000), 1);
    status = connect_result(socket->get(), address);
  }
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_NE(status.text().find("nobody listens"), std::string_view::npos) << status.to_string();
}

TEST(TcpSocketTest, AListenerOnAllNetworksIsReachedByThoseThatOthersSee) {
  EXPECT_EQ(reachable_addresses("10.1.2.3:70"), std::vector<std::string>{"10.1.2.3:70"});
  for (const std::string& each : reachable_addresses("0.0.0.0:70")) {
    EXPECT_TRUE(each.ends_with(":70")) << each;
    EXPECT_FALSE(each.starts_with("127.") || each.starts_with("0.")) << each;
  }
}

}  // namespace
}  // namespace kvzc

#include "base/unix_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "unit/unit_support.h"

namespace kvzc {
namespace {

using test::as_bytes;
using test::Child;
using test::open_fds;

std::string fresh_name() {
  static int count = 0;
  return "kvzc-test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

bool wait_readable(int fd) {
  pollfd what{fd, POLLIN, 0};
  return poll(&what, 1, 10'000) == 1;
}

struct Pair {
  OwnedFd listener;
  OwnedFd client;
  OwnedFd server;
};

Pair must_connect() {
  Pair out;
  const std::string name = fresh_name();
  Result<OwnedFd> listener = listen_at(name);
  EXPECT_TRUE(listener.is_ok()) << listener.status().to_string();
  Result<OwnedFd> client = connect_to(name);
  EXPECT_TRUE(client.is_ok()) << client.status().to_string();
  if (!listener.is_ok() || !client.is_ok()) return out;
  Result<OwnedFd> server = accept_from(listener->get());
  EXPECT_TRUE(server.is_ok() && server->is_valid());
  out.listener = listener.take();
  out.client = client.take();
  if (server.is_ok()) out.server = server.take();
  return out;
}

TEST(UnixSocket, KeepsTheBoundariesAndTheOrderOfMessages) {
  const Pair pair = must_connect();
  test::Random random(3);
  KVZC_TRACE_SEED(random);
  std::vector<std::vector<std::byte>> sent;
  for (const std::size_t nbytes : {1, 2, 100, 4096, 1, 30'000}) {
    sent.push_back(random.bytes(nbytes));
    ASSERT_TRUE(send_message(pair.client.get(), sent.back(), {}).is_ok());
  }
  for (const auto& bytes : sent) {
    Result<Message> got = receive_message(pair.server.get());
    ASSERT_TRUE(got.is_ok()) << got.status().to_string();
    EXPECT_EQ(got->bytes, bytes);
    EXPECT_TRUE(got->fds.empty());
  }
  EXPECT_EQ(receive_message(pair.server.get()).status().code(), Code::kWouldBlock);
  // And the other way.
  ASSERT_TRUE(send_message(pair.server.get(), as_bytes("back"), {}).is_ok());
  EXPECT_TRUE(receive_message(pair.client.get()).is_ok());
}

TEST(UnixSocket, TakesAMessageOfExactlyTheMost) {
  const Pair pair = must_connect();
  test::Random random(4);
  KVZC_TRACE_SEED(random);
  const std::vector<std::byte> bytes = random.bytes(kMaxMessageBytes);
  ASSERT_TRUE(send_message(pair.client.get(), bytes, {}).is_ok());
  Result<Message> got = receive_message(pair.server.get());
  ASSERT_TRUE(got.is_ok()) << got.status().to_string();
  EXPECT_EQ(got->bytes, bytes);
}

TEST(UnixSocket, RefusesAnOversizedMessageAndClosesItsDescriptors) {
  const Pair pair = must_connect();
  const int before = open_fds();
  const std::vector<std::byte> bytes(kMaxMessageBytes + 1);
  std::vector<OwnedFd> fds;
  fds.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
  // Past our own limit, as a stranger would send it.
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = fds[0].get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ASSERT_EQ(sendmsg(pair.client.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  fds.clear();
  EXPECT_EQ(receive_message(pair.server.get()).status().code(), Code::kProtocol);
  EXPECT_EQ(open_fds(), before);
  // The rest of it is gone; the next message is whole.
  ASSERT_TRUE(send_message(pair.client.get(), as_bytes("next"), {}).is_ok());
  Result<Message> next = receive_message(pair.server.get());
  ASSERT_TRUE(next.is_ok());
  EXPECT_EQ(next->bytes.size(), 4u);
}

TEST(UnixSocket, PassesDescriptorsInOrder) {
  const Pair pair = must_connect();
  for (const std::size_t count :
       {std::size_t{1}, std::size_t{2}, std::size_t{31}, kMaxMessageFds}) {
    std::vector<OwnedFd> readers;
    std::vector<OwnedFd> writers;
    for (std::size_t i = 0; i < count; ++i) {
      int ends[2];
      ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
      readers.emplace_back(ends[0]);
      writers.emplace_back(ends[1]);
    }
    ASSERT_TRUE(send_message(pair.client.get(), as_bytes("fds"), writers).is_ok());
    writers.clear();
    Result<Message> got = receive_message(pair.server.get());
    ASSERT_TRUE(got.is_ok()) << got.status().to_string();
    ASSERT_EQ(got->fds.size(), count);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_NE(fcntl(got->fds[i].get(), F_GETFD) & FD_CLOEXEC, 0);
      const char letter = static_cast<char>('a' + i);
      ASSERT_EQ(write(got->fds[i].get(), &letter, 1), 1);
      char back = 0;
      ASSERT_EQ(read(readers[i].get(), &back, 1), 1);
      EXPECT_EQ(back, letter);
    }
  }
}

TEST(UnixSocket, RefusesMoreDescriptorsThanFit) {
  const Pair pair = must_connect();
  std::vector<OwnedFd> fds;
  for (std::size_t i = 0; i <= kMaxMessageFds; ++i) {
    fds.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
  }
  EXPECT_EQ(send_message(pair.client.get(), as_bytes("fds"), fds).code(), Code::kProtocol);
  EXPECT_EQ(receive_message(pair.server.get()).status().code(), Code::kWouldBlock);
}

TEST(UnixSocket, ClosesTheDescriptorsOfAMessageThatNobodyKeeps) {
  const Pair pair = must_connect();
  std::vector<OwnedFd> fds;
  fds.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(send_message(pair.client.get(), as_bytes("fds"), fds).is_ok());
  const int before = open_fds();
  EXPECT_TRUE(receive_message(pair.server.get()).is_ok());
  EXPECT_EQ(open_fds(), before);
}

TEST(UnixSocket, SaysThatTheOtherEndIsGone) {
  Pair pair = must_connect();
  ASSERT_TRUE(send_message(pair.client.get(), as_bytes("last words"), {}).is_ok());
  pair.client.reset();
  // What was sent before arrives, then the end.
  Result<Message> last = receive_message(pair.server.get());
  ASSERT_TRUE(last.is_ok());
  EXPECT_EQ(last->bytes.size(), 10u);
  EXPECT_EQ(receive_message(pair.server.get()).status().code(), Code::kPeerLost);
  EXPECT_EQ(receive_message(pair.server.get()).status().code(), Code::kPeerLost);
  EXPECT_EQ(send_message(pair.server.get(), as_bytes("x"), {}).code(), Code::kPeerLost);
}

TEST(UnixSocket, SaysThatTheOtherEndIsGoneThoughItLeftWordsUnread) {
  Pair pair = must_connect();
  ASSERT_TRUE(send_message(pair.server.get(), as_bytes("unread"), {}).is_ok());
  pair.client.reset();
  EXPECT_EQ(receive_message(pair.server.get()).status().code(), Code::kPeerLost);
  EXPECT_EQ(receive_message(pair.server.get()).status().code(), Code::kPeerLost);
}

TEST(UnixSocket, SaysThatAProcessAtTheOtherEndWasKilled) {
  const std::string name = fresh_name();
  Result<OwnedFd> listener = listen_at(name);
  ASSERT_TRUE(listener.is_ok());
  OwnedFd server;
  {
    Child child([&] {
      Result<OwnedFd> client = connect_to(name);
      KVZC_CHILD_CHECK(client.is_ok());
      KVZC_CHILD_CHECK(send_message(client->get(), as_bytes("here"), {}).is_ok());
      pause();
      return 0;
    });
    ASSERT_TRUE(wait_readable(listener->get()));
    Result<OwnedFd> accepted = accept_from(listener->get());
    ASSERT_TRUE(accepted.is_ok() && accepted->is_valid());
    server = accepted.take();
    ASSERT_TRUE(wait_readable(server.get()));
    EXPECT_TRUE(receive_message(server.get()).is_ok());
    EXPECT_EQ(receive_message(server.get()).status().code(), Code::kWouldBlock);
  }
  ASSERT_TRUE(wait_readable(server.get()));
  EXPECT_EQ(receive_message(server.get()).status().code(), Code::kPeerLost);
}

TEST(UnixSocket, PushesBackWhenTheSocketIsFullAndGoesOnLater) {
  const Pair pair = must_connect();
  const std::vector<std::byte> bytes(16'000);
  int sent = 0;
  Status status;
  while (sent < 10'000 && (status = send_message(pair.client.get(), bytes, {})).is_ok()) ++sent;
  EXPECT_EQ(status.code(), Code::kWouldBlock);
  EXPECT_GT(sent, 0);
  for (int i = 0; i < sent; ++i) {
    Result<Message> got = receive_message(pair.server.get());
    ASSERT_TRUE(got.is_ok());
    EXPECT_EQ(got->bytes.size(), bytes.size());
  }
  EXPECT_EQ(receive_message(pair.server.get()).status().code(), Code::kWouldBlock);
  EXPECT_TRUE(send_message(pair.client.get(), bytes, {}).is_ok());
}

TEST(UnixSocket, SaysThatNobodyListens) {
  const Result<OwnedFd> client = connect_to(fresh_name());
  EXPECT_EQ(client.status().code(), Code::kPeerLost);
  // Nor does one that has gone.
  const std::string name = fresh_name();
  {
    const Result<OwnedFd> listener = listen_at(name);
  }
  EXPECT_EQ(connect_to(name).status().code(), Code::kPeerLost);
}

TEST(UnixSocket, RefusesANameThatIsInUseAndFreesItWithItsListener) {
  const std::string name = fresh_name();
  {
    const Result<OwnedFd> first = listen_at(name);
    ASSERT_TRUE(first.is_ok());
    const Result<OwnedFd> second = listen_at(name);
    EXPECT_EQ(second.status().code(), Code::kInvalidArgument);
    EXPECT_NE(second.status().text().find(name), std::string_view::npos);
  }
  EXPECT_TRUE(listen_at(name).is_ok());
}

TEST(UnixSocket, TakesNamesOf1To107Bytes) {
  for (const std::size_t length : {std::size_t{0}, std::size_t{108}, std::size_t{5000}}) {
    const std::string name(length, 'n');
    EXPECT_EQ(listen_at(name).status().code(), Code::kInvalidArgument) << length;
    EXPECT_EQ(connect_to(name).status().code(), Code::kInvalidArgument) << length;
  }
  std::string longest = fresh_name();
  longest.resize(107, '-');
  const Result<OwnedFd> listener = listen_at(longest);
  ASSERT_TRUE(listener.is_ok()) << listener.status().to_string();
  EXPECT_TRUE(connect_to(longest).is_ok());
  longest.pop_back();
  EXPECT_EQ(connect_to(longest).status().code(), Code::kPeerLost);
}

TEST(UnixSocket, GivesNothingWhenNobodyIsWaiting) {
  const Result<OwnedFd> listener = listen_at(fresh_name());
  ASSERT_TRUE(listener.is_ok());
  Result<OwnedFd> accepted = accept_from(listener->get());
  EXPECT_TRUE(accepted.is_ok());
  EXPECT_FALSE(accepted->is_valid());
}

TEST(UnixSocket, PushesBackWhenTheListenersQueueIsFull) {
  const std::string name = fresh_name();
  const Result<OwnedFd> listener = listen_at(name);
  ASSERT_TRUE(listener.is_ok());
  std::vector<OwnedFd> clients;
  Status status;
  while (status.is_ok() && clients.size() < 1000) {
    Result<OwnedFd> client = connect_to(name);
    status = client.status();
    if (client.is_ok()) clients.push_back(client.take());
  }
  EXPECT_EQ(status.code(), Code::kWouldBlock);
  ASSERT_TRUE(accept_from(listener->get()).is_ok());
  EXPECT_TRUE(connect_to(name).is_ok());
}

TEST(UnixSocket, TellsTheKernelsWordForWhoIsThere) {
  const std::string name = fresh_name();
  const Result<OwnedFd> listener = listen_at(name);
  ASSERT_TRUE(listener.is_ok());
  const pid_t parent = getpid();
  Child child([&] {
    Result<OwnedFd> client = connect_to(name);
    KVZC_CHILD_CHECK(client.is_ok());
    Result<PeerCredentials> who = peer_credentials(client->get());
    KVZC_CHILD_CHECK(who.is_ok());
    KVZC_CHILD_CHECK(who->pid == parent);
    KVZC_CHILD_CHECK(who->uid == getuid());
    char end;
    pollfd what{client->get(), POLLIN, 0};
    KVZC_CHILD_CHECK(poll(&what, 1, 10'000) == 1);
    KVZC_CHILD_CHECK(recv(client->get(), &end, 1, 0) == 0);
    return 0;
  });
  ASSERT_TRUE(wait_readable(listener->get()));
  {
    Result<OwnedFd> server = accept_from(listener->get());
    ASSERT_TRUE(server.is_ok() && server->is_valid());
    Result<PeerCredentials> who = peer_credentials(server->get());
    ASSERT_TRUE(who.is_ok()) << who.status().to_string();
    EXPECT_EQ(who->pid, child.pid());
    EXPECT_EQ(who->uid, getuid());
  }
  EXPECT_EQ(child.wait(), "exit 0");
  EXPECT_FALSE(peer_credentials(-1).is_ok());
}

TEST(UnixSocket, MakesOnlySocketsThatDoNotBlockAndCloseOnExec) {
  const Pair pair = must_connect();
  for (const int fd : {pair.listener.get(), pair.client.get(), pair.server.get()}) {
    EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_NE(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
  }
}

#if !KVZC_SANITIZED
TEST(UnixSocket, SaysThatDescriptorsDoNotFitIntoTheLimit) {
  const Pair pair = must_connect();
  std::vector<OwnedFd> fds;
  for (int i = 0; i < 4; ++i) fds.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(send_message(pair.client.get(), as_bytes("fds"), fds).is_ok());
  Child child([&] {
    // Room for two more.
    const OwnedFd next(dup(0));
    const rlimit small{static_cast<rlim_t>(next.get() + 2), static_cast<rlim_t>(next.get() + 2)};
    KVZC_CHILD_CHECK(setrlimit(RLIMIT_NOFILE, &small) == 0);
    KVZC_CHILD_CHECK(receive_message(pair.server.get()).status().code() == Code::kLimitExceeded);
    // Those that came are closed again.
    KVZC_CHILD_CHECK(OwnedFd(dup(0)).is_valid());
    return 0;
  });
  EXPECT_EQ(child.wait(), "exit 0");
}

TEST(UnixSocket, SaysThatNoDescriptorIsLeft) {
  const std::string name = fresh_name();
  const Result<OwnedFd> listener = listen_at(name);
  ASSERT_TRUE(listener.is_ok());
  Child child([&] {
    const rlimit none{static_cast<rlim_t>(0), static_cast<rlim_t>(0)};
    KVZC_CHILD_CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    KVZC_CHILD_CHECK(connect_to(name).status().code() == Code::kLimitExceeded);
    KVZC_CHILD_CHECK(listen_at(name + "x").status().code() == Code::kLimitExceeded);
    return 0;
  });
  EXPECT_EQ(child.wait(), "exit 0");
}
#endif

}  // namespace
}  // namespace kvzc

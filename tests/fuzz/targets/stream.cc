// Control messages on TCP, which come in whatever pieces.
#include <sys/socket.h>

#include "core/control_socket.h"
#include "core/wire.h"
#include "fuzz/target.h"

namespace kvzc {

KVZC_FUZZ_TARGET(stream)(fuzz::Bytes input) {
  int ends[2];
  KVZC_FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  const OwnedFd other(ends[1]);
  ControlSocket socket(ControlSocket::Kind::kTcp, OwnedFd(ends[0]));
  fuzz::Input in(input);
  std::vector<std::byte> sent, received;
  bool is_refused = false;
  while (!in.is_at_end() && !is_refused) {
    const fuzz::Bytes piece = in.part();
    if (piece.empty()) continue;
    KVZC_FUZZ_CHECK(send(other.get(), piece.data(), piece.size(), MSG_NOSIGNAL) ==
                    static_cast<ssize_t>(piece.size()));
    sent.insert(sent.end(), piece.begin(), piece.end());
    for (;;) {
      const Result<Message> message = socket.receive();
      if (!message.is_ok()) {
        is_refused = message.status().code() != Code::kWouldBlock;
        KVZC_FUZZ_CHECK(!is_refused || message.status().code() == Code::kProtocol);
        break;
      }
      KVZC_FUZZ_CHECK(message->bytes.size() >= wire::kHeaderBytes && message->fds.empty());
      received.insert(received.end(), message->bytes.begin(), message->bytes.end());
    }
  }
  // Nothing is lost, nothing comes twice, and no message waits that was whole.
  KVZC_FUZZ_CHECK(received.size() <= sent.size());
  KVZC_FUZZ_CHECK(std::equal(received.begin(), received.end(), sent.begin()));
  const fuzz::Bytes rest = fuzz::Bytes(sent).subspan(received.size());
  if (is_refused || rest.size() < wire::kHeaderBytes) return;
  KVZC_FUZZ_CHECK(wire::message_bytes(rest) > rest.size());
}

}  // namespace kvzc

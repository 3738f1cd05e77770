// Who cannot prove that they know the key gets nothing: neither memory nor an answer that counts.
//
// A relay stands between writer and owner and passes every control message on, with its
// descriptors, but for one that it damages. Everything else being right, only the one look at that
// message can refuse.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "conformance/peer_group.h"
#include "core/wire.h"

namespace kvzc::conformance {
namespace {

using Bytes = std::vector<std::byte>;
// Gives the messages that go on in place of one of the wanted type; the rest passes as it is.
using Change = std::function<std::vector<Bytes>(std::span<const std::byte> body)>;

class Relay {
 public:
  Relay(RemoteView owner, wire::Type type, Change change)
      : owner_(std::move(owner)), type_(type), change_(std::move(change)) {
    thread_ = std::thread([this] { serve(); });
  }
  ~Relay() {
    is_over_.store(true);
    thread_.join();
  }
  const std::string& address() const { return listener_.address; }
  bool has_changed() const { return has_changed_.load(); }

 private:
  void serve() {
    ControlSocket ends[2];
    while (!is_over_.load()) {
      if (!ends[0].is_valid()) {
        ends[0] = listener_.accept();
        if (ends[0].is_valid()) ends[1] = connect_as_engine(owner_);
      }
      pollfd waits[2] = {{ends[0].fd(), POLLIN, 0}, {ends[1].fd(), POLLIN, 0}};
      poll(waits, 2, 5);
      for (int from = 0; from < 2 && ends[0].is_valid(); ++from) {
        Result<Message> message = ends[from].receive();
        if (message.is_ok()) {
          pass_on(message.take(), ends[1 - from]);
        } else if (message.status().code() == Code::kPeerLost) {
          ends[0] = {};
          ends[1] = {};
        }
      }
    }
  }
  void pass_on(Message message, ControlSocket& to) {
    const auto opened = wire::open(message.bytes);
    if (!opened.is_ok() || opened->first != type_) {
      (void)to.send(message);
      return;
    }
    has_changed_.store(true);  // First: what is sent may end all of it.
    for (Bytes& bytes : change_(opened->second)) {
      message.bytes = std::move(bytes);
      (void)to.send(message);
      message.fds.clear();
    }
  }

  const RemoteView owner_;
  const wire::Type type_;
  const Change change_;
  const TestListener listener_ = listen_somewhere();
  std::atomic<bool> is_over_{false};
  std::atomic<bool> has_changed_{false};
  std::thread thread_;
};

class ProofTest : public Conformance {
 protected:
  // Between hosts one proof is for the key and for the secret.
  static Code key_refused() {
    return GetParam().sut.between_hosts ? Code::kAccessDenied : Code::kBadHandle;
  }
  // Puts through a relay; gives how that ended. The owner finds its memory unchanged.
  void run_relayed(wire::Type type, const Change& change, std::initializer_list<Code> expected) {
    run(
        [&](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, 4096);
          fill(memory.data(), 4096, 1);
          party.tell(memory.handle_text());
          party.hear();
          EXPECT_EQ(first_difference(memory.data(), 4096, 1), -1);
          party.tell("seen");
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          const RemoteView direct = open_handle(party.hear());
          Relay relay(direct, type, change);
          const RemoteView target = at_address(direct, relay.address());
          std::vector<std::byte> source(4096, std::byte{0xaa});
          const LocalView view = view_of(*engine, source.data(), source.size());
          const TransferItem item{&view, &target};
          const Transfer transfer = engine->put({&item, 1}, {}, in_seconds(30)).take();
          ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
          EXPECT_TRUE(relay.has_changed());
          EXPECT_NE(std::find(expected.begin(), expected.end(), transfer.status().code()),
                    expected.end())
              << transfer.status().to_string();
          party.meet();
        });
  }
};

template <typename M>
std::vector<Bytes> with_another_proof(Result<M> message) {
  message->proof[3] ^= std::byte{1};
  return {wire::encode(*message)};
}

TEST_P(ProofTest, AnOwnerThatDoesNotProveTheKeyIsNotBelieved) {
  run_relayed(wire::Type::kChallenge,
              [](auto body) { return with_another_proof(wire::decode_challenge(body)); },
              {key_refused()});
}

TEST_P(ProofTest, AHolderThatDoesNotProveTheKeyIsNotLetIn) {
  run_relayed(wire::Type::kProof,
              [](auto body) { return with_another_proof(wire::decode_proof(body)); },
              {key_refused()});
}

TEST_P(ProofTest, AHolderThatDoesNotProveTheKeyOfAGrantDoesNotGetIt) {
  run_relayed(wire::Type::kAttach,
              [](auto body) { return with_another_proof(wire::decode_attach(body)); },
              {Code::kBadHandle});
}

TEST_P(ProofTest, AnOwnerThatDoesNotProveTheKeyOfAGrantIsNotWrittenTo) {
  run_relayed(wire::Type::kAttached,
              [](auto body) { return with_another_proof(wire::decode_attached(body)); },
              {Code::kBadHandle});
}

TEST_P(ProofTest, AStorageOfAnotherSizeThanTheHandleSaysIsNotWrittenTo) {
  run_relayed(wire::Type::kStorage,
              [](auto body) {
                Result<wire::Storage> storage = wire::decode_storage(body);
                storage->nbytes -= 64;
                return std::vector<Bytes>{wire::encode(*storage)};
              },
              {Code::kBadHandle});
}

TEST_P(ProofTest, MemoryThatNobodyAskedForEndsTheConnection) {
  run_relayed(wire::Type::kStorage,
              [](auto body) {
                Result<wire::Storage> storage = wire::decode_storage(body);
                // With the descriptors that came; the second has none, and is of no use for that.
                std::vector<Bytes> all{wire::encode(*storage)};
                storage->roads.clear();
                storage->id += 1'000'000;
                all.push_back(wire::encode(*storage));
                return all;
              },
              {Code::kProtocol});
}

TEST_P(ProofTest, AFenceSlotThatIsNotOnTheOwnersBoardIsRefused) {
  if (GetParam().sut.is_remote) GTEST_SKIP() << "no board is shared";
  // The relay's process is not the one that owns private memory, and that is found out before.
  const bool is_another_process =
      GetParam().sut.memory == MemoryKind::kPrivate && GetParam().mode == Mode::kProcesses;
  run_relayed(wire::Type::kAttached,
              [](auto body) {
                Result<wire::Attached> attached = wire::decode_attached(body);
                attached->fence_slot = 0xfffffff0;
                return std::vector<Bytes>{wire::encode(*attached)};
              },
              {is_another_process ? Code::kTransportUnavailable : Code::kRevoked});
}

KVZC_CONFORMANCE(ProofTest);

}  // namespace
}  // namespace kvzc::conformance

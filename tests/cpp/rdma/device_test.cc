// What devices say of themselves, and what befalls them: the smaller of two limits counts, the right
// address is taken, and a device that fails ends what ran on it.

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "rdma/lies_test.h"
#include "transport/rdma/queue_pair.h"

namespace kvzc::lies {
namespace {

using rdma::QueuePair;
using rdma::QueuePairAddress;
using rdma::Rail;

class LimitTest : public LiesTest {
 protected:
  void put_something() {
    open(kOneRail);
    const OwnedMemory memory = own(100'000);
    std::vector<std::byte> source(memory.nbytes());
    fill(source.data(), source.size(), 1);
    const Status done =
        put(view_of(*writer_, source.data(), source.size()), open_handle(memory.handle_text()));
    ASSERT_TRUE(done.is_ok()) << done.to_string();
    EXPECT_EQ(first_difference(memory.data(), memory.nbytes(), 1), -1);
  }
};

// --- NETW-11 ---

TEST_F(LimitTest, TheSmallerMtuOfBothEndsIsUsed) {
  for (const std::string small : {"owner:rxe0", "writer:rxe0"}) {
    stop_lying();
    device(small).active_mtu = IBV_MTU_512;
    put_something();
    const auto connected = modified_to(IBV_QPS_RTR);
    ASSERT_EQ(connected.size(), 2u);
    for (const Modified& each : connected) {
      EXPECT_EQ(each.attributes.path_mtu, IBV_MTU_512) << each.device << ", " << small;
    }
    close();
  }
}

TEST_F(LimitTest, TheMtuIsThatOfTheDevicesWhereTheyAgree) {
  for (const std::string each : {"owner:rxe0", "writer:rxe0"}) device(each).active_mtu = IBV_MTU_256;
  put_something();
  for (const Modified& each : modified_to(IBV_QPS_RTR)) {
    EXPECT_EQ(each.attributes.path_mtu, IBV_MTU_256);
  }
}

// --- Reads at the same time ---

TEST_F(LimitTest, ManyGetsAtOnceThroughADeviceThatAnswersOneRead) {
  // The owner answers one at a time; the writer would ask for more.
  device("owner:rxe0").max_reads = 1;
  open(kOneRail);
  constexpr std::uint64_t kPiece = 12'345;
  constexpr std::int64_t kCount = 48;
  const OwnedMemory memory = own(kPiece * kCount, 2);
  const RemoteView remote = open_handle(memory.handle_text());
  std::vector<std::byte> target(kPiece * kCount);
  const LocalView local = view_of(*writer_, target.data(), target.size());
  std::vector<Transfer> running;
  for (std::int64_t i = 0; i < kCount; ++i) {
    const std::int64_t begin = i * static_cast<std::int64_t>(kPiece);
    const std::int64_t end = begin + static_cast<std::int64_t>(kPiece);
    const LocalView to = slice(local, begin, end);
    const RemoteView from = slice(remote, begin, end);
    const TransferItem item{&to, &from};
    running.push_back(writer_->get({&item, 1}, {}, in_seconds(20)).take());
  }
  for (const Transfer& each : running) {
    ASSERT_TRUE(each.wait(in_seconds(20)).is_ok());
    EXPECT_TRUE(each.status().is_ok()) << each.status().to_string();
  }
  EXPECT_EQ(first_difference(target.data(), target.size(), 2), -1);
  for (const Modified& each : modified_to(IBV_QPS_RTR)) {
    if (each.device == "owner:rxe0") {
      EXPECT_EQ(each.attributes.max_dest_rd_atomic, 1);
    }
  }
  const auto connected = modified_to(IBV_QPS_RTS);
  ASSERT_EQ(connected.size(), 2u);
  for (const Modified& each : connected) {
    EXPECT_EQ(each.attributes.max_rd_atomic, 1) << each.device;
  }
}

// --- COMP-10: a queue that is too short is said so, and not overrun ---

TEST_F(LimitTest, ACompletionQueueWithoutRoomForThePeerIsSaid) {
  device("writer:rxe0").max_cqe = 100;
  open(kOneRail);
  const OwnedMemory memory = own(4096);
  std::vector<std::byte> source(4096);
  const Status failed =
      put(view_of(*writer_, source.data(), source.size()), open_handle(memory.handle_text()));
  EXPECT_EQ(failed.code(), Code::kLimitExceeded) << failed.to_string();
  EXPECT_HAS(failed.text(), "rxe0");
  EXPECT_HAS(failed.text(), "queue_depth");
}

TEST_F(LimitTest, ADeviceThatGathersNothingMovesScatteredBlocks) {
  for (const std::string each : {"owner:rxe0", "writer:rxe0"}) device(each).max_sge = 1;
  open(kOneRail);
  const OwnedMemory memory = own(64 * 1000);
  std::vector<std::byte> source(64 * 1000);
  fill(source.data(), source.size(), 3);
  std::vector<std::int64_t> reversed;
  for (std::int64_t i = 63; i >= 0; --i) reversed.push_back(i);
  const TensorSpec target_spec = rows_of(memory.data(), 64, 1000);
  Region region = owner_->register_memory({&target_spec, 1}).take();
  const LocalView local = writer_->find_or_borrow(rows_of(source.data(), 64, 1000)).take();
  const Status done = put(pick(local, reversed), handle_of(*region.handle()));
  ASSERT_TRUE(done.is_ok()) << done.to_string();
  for (std::uint64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(std::memcmp(memory.data() + 1000 * i, &source[1000 * (63 - i)], 1000), 0) << i;
  }
  EXPECT_EQ(device("writer:rxe0").writes, 64u);
}

// --- NETW-10: the address ---

ibv_gid_entry gid(std::uint32_t index, int type, const std::string& address) {
  ibv_gid_entry out{};
  out.gid_index = index;
  out.port_num = 1;
  out.gid_type = static_cast<std::uint32_t>(type);
  const std::string text =
      address.find(':') == std::string::npos ? "::ffff:" + address : address;
  EXPECT_EQ(inet_pton(AF_INET6, text.c_str(), out.gid.raw), 1) << text;
  return out;
}

std::string text_of_gid(const ibv_gid& raw) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, raw.raw, text, sizeof text);
  return text;
}

// One queue pair on each device, whose tables are made up; nothing is sent.
class AddressTest : public LiesTest, private rdma::CompletionTarget {
 protected:
  struct End {
    std::unique_ptr<Rail> rail;
    std::unique_ptr<QueuePair> pair;
  };
  struct Chosen {
    int index = -1;
    std::string to;
  };
  using Table = std::vector<ibv_gid_entry>;

  void SetUp() override {
    LiesTest::SetUp();
    connect_nothing();
  }

  End make(const std::string& engine, const Table& table, int gid_index) {
    open_as(engine);
    device(engine + ":rxe0").gids = table;
    RdmaOptions options;
    options.devices = {"rxe0"};
    options.gid_index = gid_index;
    End out;
    out.rail = Rail::open(rdma::Device::open_all(options).take()[0], 0).take();
    out.pair = QueuePair::make(*out.rail, this, options).take();
    return out;
  }

  // Gives what each side has chosen, or why it could not.
  Status connect(const Table& ours, const Table& theirs, Chosen* here, Chosen* there,
                 int our_index = -1, bool is_same_host = false) {
    const std::size_t before = modified_to(IBV_QPS_RTR).size();
    const End a = make("owner", ours, our_index);
    const End b = make("writer", theirs, -1);
    if (Status done = a.pair->connect(b.pair->address(), is_same_host); !done.is_ok()) return done;
    if (Status done = b.pair->connect(a.pair->address(), is_same_host); !done.is_ok()) return done;
    const auto connected = modified_to(IBV_QPS_RTR);
    EXPECT_EQ(connected.size(), before + 2);
    for (const auto& [out, from] : {std::pair(here, before), std::pair(there, before + 1)}) {
      const ibv_ah_attr& way = connected[from].attributes.ah_attr;
      *out = {way.grh.sgid_index, text_of_gid(way.grh.dgid)};
      EXPECT_EQ(way.is_global, 1);
    }
    return Status::ok();
  }

 private:
  void on_completions(std::size_t, std::span<const ibv_wc>, rdma::Endings&) override {}
};

const int kV1 = IBV_GID_TYPE_ROCE_V1;
const int kV2 = IBV_GID_TYPE_ROCE_V2;

TEST_F(AddressTest, TheRightOneIsTakenInWhateverOrderTheyStand) {
  std::vector<ibv_gid_entry> ours{
      gid(5, kV1, "10.9.0.1"),              // The right address of the wrong kind,
      gid(0, kV2, "fe80::1234:56ff:fe78:1"),  // one that leads no further than the link,
      gid(6, kV2, "192.168.7.1"),           // one of a network that the peer is not in,
      gid(1, kV2, "10.9.0.1"),
  };
  const std::vector<ibv_gid_entry> theirs{
      gid(0, kV2, "fe80::1234:56ff:fe78:2"), gid(3, kV1, "10.9.0.2"), gid(2, kV2, "10.9.0.2"),
      gid(8, kV2, "172.16.0.2"), gid(4, kV1, "fe80::1234:56ff:fe78:2")};
  std::vector<std::size_t> order{0, 1, 2, 3};
  do {
    std::vector<ibv_gid_entry> table;
    for (const std::size_t i : order) table.push_back(ours[i]);
    Chosen here, there;
    const Status done = connect(table, theirs, &here, &there);
    ASSERT_TRUE(done.is_ok()) << done.to_string();
    const std::string words = "order " + std::to_string(order[0]) + std::to_string(order[1]) +
                              std::to_string(order[2]) + std::to_string(order[3]);
    EXPECT_EQ(here.index, 1) << words;
    EXPECT_EQ(here.to, "::ffff:10.9.0.2") << words;
    EXPECT_EQ(there.index, 2) << words;
    EXPECT_EQ(there.to, "::ffff:10.9.0.1") << words;
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(AddressTest, OneOfRoceV1IsTakenWhereBothHaveNoOther) {
  Chosen here, there;
  const Status done = connect({gid(0, kV1, "fe80::1"), gid(3, kV1, "10.9.0.1")},
                              {gid(0, kV2, "fe80::2"), gid(1, kV1, "10.9.0.2")}, &here, &there);
  ASSERT_TRUE(done.is_ok()) << done.to_string();
  EXPECT_EQ(here.index, 3);
  EXPECT_EQ(there.index, 1);
}

TEST_F(AddressTest, OneOfAPairOfIpv6IsTaken) {
  Chosen here, there;
  const Status done =
      connect({gid(0, kV2, "fe80::1"), gid(3, kV2, "fd00:1::1"), gid(4, kV2, "fd00:2::1")},
              {gid(0, kV2, "fe80::2"), gid(1, kV2, "fd00:2::2")}, &here, &there);
  ASSERT_TRUE(done.is_ok()) << done.to_string();
  EXPECT_EQ(here.index, 4);
  EXPECT_EQ(here.to, "fd00:2::2");
}

TEST_F(AddressTest, ThatWasAskedForIsTaken) {
  const Table ours{gid(1, kV2, "10.9.0.1"), gid(6, kV2, "192.168.7.1")};
  const Table theirs{gid(1, kV2, "10.9.0.2")};
  Chosen here, there;
  ASSERT_TRUE(connect(ours, theirs, &here, &there, 6).is_ok());
  EXPECT_EQ(here.index, 6);
  EXPECT_EQ(there.to, "::ffff:192.168.7.1");
}

TEST_F(AddressTest, ThatFitsIsMissedWithTheAddressesOfBothInTheError) {
  const Table ours{gid(0, kV2, "fe80::1"), gid(1, kV1, "10.9.0.1")};
  const Table theirs{gid(1, kV2, "10.9.0.2"), gid(2, kV2, "fd00::2")};
  Chosen here, there;
  const Status failed = connect(ours, theirs, &here, &there);
  EXPECT_EQ(failed.code(), Code::kTransportUnavailable);
  for (const char* each : {"rxe0", "fe80::1", "10.9.0.1", "10.9.0.2", "fd00::2", "gid_index"}) {
    EXPECT_HAS(failed.text(), each);
  }
}

// As of a bridge that every host has, or an address that moves between hosts.
TEST_F(AddressTest, ThatBothHostsHaveLeadsNowhereAndAnotherIsTaken) {
  const Table ours{gid(3, kV2, "172.17.0.1"), gid(1, kV2, "10.9.0.1")};
  const Table theirs{gid(3, kV2, "172.17.0.1"), gid(1, kV2, "10.9.0.2")};
  Chosen here, there;
  const Status done = connect(ours, theirs, &here, &there);
  ASSERT_TRUE(done.is_ok()) << done.to_string();
  EXPECT_EQ(here.index, 1);
  EXPECT_EQ(there.index, 1);
}

TEST_F(AddressTest, ThatBothHostsHaveIsSaidWhereThereIsNoOther) {
  const Table table{gid(3, kV2, "172.17.0.1")};
  Chosen here, there;
  const Status failed = connect(table, table, &here, &there);
  EXPECT_EQ(failed.code(), Code::kTransportUnavailable);
  EXPECT_HAS(failed.text(), "172.17.0.1");
  // On one host it is one port that talks to itself.
  EXPECT_TRUE(connect(table, table, &here, &there, -1, /*is_same_host=*/true).is_ok());
}

// Every port has a link-local address, also one of a bridge: that it differs makes it no way.
TEST_F(AddressTest, ThatIsLinkLocalIsNoOther) {
  const Table ours{gid(0, kV2, "fe80::1"), gid(3, kV2, "172.17.0.1")};
  const Table theirs{gid(0, kV2, "fe80::2"), gid(3, kV2, "172.17.0.1")};
  Chosen here, there;
  const Status failed = connect(ours, theirs, &here, &there);
  EXPECT_EQ(failed.code(), Code::kTransportUnavailable);
  EXPECT_HAS(failed.text(), "172.17.0.1");
}

// Where both have nothing else it is the only way there can be.
TEST_F(AddressTest, ThatIsLinkLocalIsTakenWhereBothHaveNoOther) {
  const Table ours{gid(0, kV2, "fe80::1")};
  const Table theirs{gid(0, kV2, "fe80::2")};
  Chosen here, there;
  const Status done = connect(ours, theirs, &here, &there);
  ASSERT_TRUE(done.is_ok()) << done.to_string();
  EXPECT_EQ(here.to, "fe80::2");
}

TEST_F(LimitTest, AnAddressThatLeadsNowhereIsSaidByTheTransfer) {
  device("owner:rxe0").gids = {gid(0, kV1, "10.9.0.77")};
  open(kOneRail);
  const OwnedMemory memory = own(4096);
  std::vector<std::byte> source(4096);
  const Status failed =
      put(view_of(*writer_, source.data(), source.size()), open_handle(memory.handle_text()));
  EXPECT_EQ(failed.code(), Code::kTransportUnavailable) << failed.to_string();
  EXPECT_HAS(failed.text(), "10.9.0.77");
  EXPECT_HAS(failed.text(), "10.9.0.1");
}

// --- PERF-05: a device that is not there ---

TEST_F(LimitTest, ADeviceThatIsNotThereIsAnErrorThatNamesThoseThatAre) {
  EngineOptions options;
  options.transports = {"rdma"};
  options.rdma.devices = {"rxe0", "mlx5_7"};
  const auto engine = Engine::create(std::move(options));
  ASSERT_FALSE(engine.is_ok());
  EXPECT_EQ(engine.status().code(), Code::kInvalidArgument);
  for (const char* each : {"mlx5_7", "rxe0", "rxe1"}) EXPECT_HAS(engine.status().text(), each);
}

// --- A device fails ---

class EventTest : public LiesTest {
 protected:
  static constexpr std::uint64_t kPiece = 1 << 18;
  static constexpr std::uint64_t kPieces = 12;

  // A stream of puts, in the middle of which `befall` is called. Gives how each ended.
  std::vector<Status> stream(const std::function<void()>& befall) {
    memory_ = own(kPiece * kPieces);
    const RemoteView remote = open_handle(memory_.handle_text());
    TransferOptions hello;
    hello.notify = "hello";
    EXPECT_TRUE(writer_->try_notify(remote, hello)->wait(in_seconds(20)).is_ok());
    writer_peer_ = owner_->wait_arrivals("hello", 1, nullptr, in_seconds(20)).take()[0].peer;
    connect(remote);
    owner_peer_ = writer_->peer_of(remote).take();
    source_.resize(kPiece * kPieces);
    fill(source_.data(), source_.size(), 4);
    const LocalView local = view_of(*writer_, source_.data(), source_.size());
    std::vector<Status> out(kPieces);
    std::vector<Transfer> running(kPieces);
    for (std::size_t i = 0; i < kPieces; ++i) {
      if (i == kPieces / 2) befall();
      const std::int64_t begin = static_cast<std::int64_t>(i * kPiece);
      const LocalView from = slice(local, begin, begin + static_cast<std::int64_t>(kPiece));
      const RemoteView to = slice(remote, begin, begin + static_cast<std::int64_t>(kPiece));
      const TransferItem item{&from, &to};
      const std::string tag = "put " + std::to_string(i);
      TransferOptions options;
      options.notify = tag;
      Result<Transfer> put = writer_->put({&item, 1}, options, in_seconds(20));
      if (put.is_ok()) {
        running[i] = put.take();
      } else {
        out[i] = put.status();
      }
    }
    for (std::size_t i = 0; i < kPieces; ++i) {
      if (!out[i].is_ok()) continue;
      const Status waited = running[i].wait(in_seconds(20));
      EXPECT_NE(waited.code(), Code::kTimedOut) << i;
      out[i] = running[i].has_ended() ? running[i].status() : waited;
    }
    return out;
  }

  void expect_whole(std::size_t i) {
    EXPECT_EQ(std::memcmp(memory_.data() + i * kPiece, source_.data() + i * kPiece, kPiece), 0)
        << "put " << i << " is done, its bytes are not";
  }

  void expect_all_done(const std::vector<Status>& ends) {
    for (std::size_t i = 0; i < kPieces; ++i) {
      EXPECT_TRUE(ends[i].is_ok()) << ends[i].to_string();
      expect_whole(i);
      const std::string tag = "put " + std::to_string(i);
      const auto arrived = owner_->wait_arrivals(tag, 1, nullptr, in_seconds(20));
      ASSERT_TRUE(arrived.is_ok()) << arrived.status().to_string();
      EXPECT_EQ((*arrived)[0].code, Code::kOk);
    }
    EXPECT_TRUE(owner_->poll_arrivals(100).empty()) << "a tag came twice";
    EXPECT_TRUE(memory_.region.close(in_seconds(20)).is_ok());
  }

  // Each side hears that the other is lost, and what was done is whole.
  void expect_both_lost(const std::vector<Status>& ends) {
    for (std::size_t i = 0; i < kPieces; ++i) {
      if (ends[i].is_ok()) {
        expect_whole(i);
      } else {
        EXPECT_EQ(ends[i].code(), Code::kPeerLost) << ends[i].to_string();
      }
    }
    EXPECT_EQ(ends.back().code(), Code::kPeerLost);
    const auto heard = owner_->wait_arrivals("never", 1, writer_peer_.get(), in_seconds(20));
    EXPECT_EQ(heard.status().code(), Code::kPeerLost) << heard.status().to_string();
    // Nothing of the lost peer holds the memory up.
    EXPECT_TRUE(memory_.region.close(in_seconds(20)).is_ok());
  }

  OwnedMemory memory_;
  std::vector<std::byte> source_;
  std::shared_ptr<const PeerInfo> writer_peer_, owner_peer_;
};

TEST_F(EventTest, TheOnlyDeviceOfTheWriterFailsAndBothHear) {
  open(kOneRail);
  const auto ends = stream([] { EXPECT_EQ(raise("writer:rxe0", IBV_EVENT_DEVICE_FATAL), 1); });
  expect_both_lost(ends);
  EXPECT_HAS(ends.back().text(), "rxe0");
  EXPECT_HAS(ends.back().text(), "catastrophic");
}

TEST_F(EventTest, TheOnlyDeviceOfTheOwnerFailsAndBothHear) {
  open(kOneRail);
  expect_both_lost(stream([] { EXPECT_EQ(raise("owner:rxe0", IBV_EVENT_DEVICE_FATAL), 1); }));
}

// As after a reset: not even what was flushed comes back.
TEST_F(EventTest, TheOnlyDeviceDiesWithoutAWordOfWhatItHad) {
  open(kOneRail);
  const auto ends = stream([] {
    device("writer:rxe0").is_dead = true;
    EXPECT_EQ(raise("writer:rxe0", IBV_EVENT_DEVICE_FATAL), 1);
  });
  EXPECT_EQ(ends.back().code(), Code::kPeerLost) << ends.back().to_string();
  const std::int64_t patience = in_seconds(10);
  while (writer_->peer_status(*owner_peer_).is_ok() && in_seconds(0) < patience) {
    std::this_thread::yield();
  }
  EXPECT_EQ(writer_->peer_status(*owner_peer_).code(), Code::kPeerLost);
  // The owner is not told that nothing moves any more, as nobody knows. It can see to that itself.
  const Status cut = memory_.region.revoke(in_seconds(1), Force::kYes);
  EXPECT_TRUE(cut.is_ok()) << cut.to_string();
  EXPECT_TRUE(memory_.region.close(in_seconds(20)).is_ok());
  // Until it gives back what it had nothing of that ends well.
  device("writer:rxe0").is_dead = false;
}

TEST_F(EventTest, OneOfTwoDevicesFailsAndTheOtherCarriesOn) {
  open(kTwoRails);
  expect_all_done(stream([] { EXPECT_EQ(raise("writer:rxe0", IBV_EVENT_DEVICE_FATAL), 1); }));
}

TEST_F(EventTest, APortOfTwoIsDownAndTheOtherCarriesOn) {
  open(kTwoRails);
  expect_all_done(stream([] { EXPECT_EQ(raise("writer:rxe0", IBV_EVENT_PORT_ERR), 1); }));
}

// It may come back, and retries bridge that.
TEST_F(EventTest, TheOnlyPortIsDownAndIsKept) {
  open(kOneRail);
  expect_all_done(stream([] { EXPECT_EQ(raise("writer:rxe0", IBV_EVENT_PORT_ERR), 1); }));
}

}  // namespace
}  // namespace kvzc::lies

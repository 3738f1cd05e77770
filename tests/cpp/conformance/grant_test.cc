// A grant reaches just its view, for what it allows, and is revoked alone; once it is, not one more
// byte moves through it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class GrantTest : public Conformance {};

constexpr std::int64_t kSlice = 256 << 10;

LocalView whole(const OwnedMemory& memory) { return memory.region.view().take(); }

Grant grant_slice(Engine& engine, const OwnedMemory& memory, std::int64_t at, Access access) {
  return engine.grant(slice(whole(memory), at * kSlice, (at + 1) * kSlice), access).take();
}

Status move(Engine& engine, Direction direction, const LocalView& local, const RemoteView& remote) {
  const TransferItem item{&local, &remote};
  Result<Transfer> transfer = direction == Direction::kPut
                                  ? engine.put({&item, 1}, {}, in_seconds(30))
                                  : engine.get({&item, 1}, {}, in_seconds(30));
  if (!transfer.is_ok()) return transfer.status();
  if (Status waited = transfer->wait(in_seconds(30)); !waited.is_ok()) return waited;
  return transfer->status();
}

TEST_P(GrantTest, ItsHandleIsJustItsView) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 4096);
        std::memset(memory.data(), 0x11, 4096);
        const Grant grant = engine->grant(slice(whole(memory), 1000, 3000), Access::kPut).take();
        party.tell(text_of(grant));
        party.hear();
        for (std::uint64_t i = 0; i < 4096; ++i) {
          const bool is_within = i >= 1000 && i < 3000;
          ASSERT_EQ(memory.data()[i], is_within ? pattern(i - 1000, 5) : std::byte{0x11}) << i;
        }
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        EXPECT_EQ(target.view.nbytes(), 2000u);
        std::byte source[2000];
        fill(source, sizeof source, 5);
        put_and_wait(*engine, view_of(*engine, source, sizeof source), target);
        const Index beyond = std::int64_t{2000};
        EXPECT_EQ(target.index({&beyond, 1}).status().code(), Code::kOutOfRange);
        party.tell("done");
      });
}

TEST_P(GrantTest, ItAllowsWhatItSays) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 3 * kSlice);
        const Grant put = grant_slice(*engine, memory, 0, Access::kPut);
        const Grant get = grant_slice(*engine, memory, 1, Access::kGet);
        const Grant both = grant_slice(*engine, memory, 2, Access::kBoth);
        for (const Grant* each : {&put, &get, &both}) party.tell(text_of(*each));
        party.hear();
      },
      [](Party& party) {
        auto engine = party.make_engine();
        std::vector<std::byte> bytes(kSlice);
        const LocalView view = view_of(*engine, bytes.data(), bytes.size());
        const Code expected[3][2] = {{Code::kOk, Code::kAccessDenied},
                                     {Code::kAccessDenied, Code::kOk},
                                     {Code::kOk, Code::kOk}};
        for (const auto& [put, get] : expected) {
          const RemoteView remote = open_handle(party.hear());
          EXPECT_EQ(move(*engine, Direction::kPut, view, remote).code(), put);
          EXPECT_EQ(move(*engine, Direction::kGet, view, remote).code(), get);
        }
        party.tell("done");
      });
}

TEST_P(GrantTest, OnlyAPartOfAnOpenRegionOfTheEngineCanBeGranted) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        auto other = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        const LocalView view = whole(memory);
        EXPECT_EQ(other->grant(view, Access::kPut).status().code(), Code::kNotRegistered);
        std::byte bytes[64];
        const LocalView borrowed = view_of(*engine, bytes, sizeof bytes);
        EXPECT_EQ(engine->grant(borrowed, Access::kPut).status().code(), Code::kNotRegistered);
        const Grant grant = engine->grant(view, Access::kPut).take();
        ASSERT_TRUE(memory.region.close(in_seconds(30)).is_ok());
        EXPECT_EQ(engine->grant(view, Access::kPut).status().code(), Code::kClosed);
        EXPECT_TRUE(grant.is_revoked());
        EXPECT_EQ(grant.handle().status().code(), Code::kRevoked);
        EXPECT_TRUE(grant.revoke(in_seconds(30), Force::kNo).is_ok());
        EXPECT_EQ(engine->stats().grants, 0u);
      },
      [](Party&) {});
}

TEST_P(GrantTest, AHundredThousandAreAliveAndGoAtOnce) {
  constexpr int kMany = 100'000;
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kMany);
        std::vector<Grant> grants;
        std::set<std::uint64_t> ids;
        for (int i = 0; i < kMany; ++i) {
          grants.push_back(
              engine->grant(slice(whole(memory), i, i + 1), Access::kPut).take());
        }
        for (const int i : {0, 1, kMany / 2, kMany - 1}) {
          ids.insert(grants[static_cast<std::size_t>(i)].handle()->grant_id);
        }
        EXPECT_EQ(ids.size(), 4u);
        EXPECT_EQ(engine->stats().grants, static_cast<std::uint64_t>(kMany));
        party.tell(text_of(grants[kMany - 1]));
        party.hear();
        EXPECT_EQ(memory.data()[kMany - 1], std::byte{9});
        EXPECT_EQ(memory.data()[kMany - 2], std::byte{});
        ASSERT_TRUE(grants[0].revoke(in_seconds(30), Force::kNo).is_ok());
        EXPECT_EQ(engine->stats().grants, static_cast<std::uint64_t>(kMany - 1));
        ASSERT_TRUE(memory.region.revoke(in_seconds(30), Force::kNo).is_ok());
        EXPECT_EQ(engine->stats().grants, 0u);
        EXPECT_TRUE(memory.region.is_open());
        // Their places are used again, their names never.
        const Grant fresh = engine->grant(whole(memory), Access::kPut).take();
        EXPECT_FALSE(ids.contains(fresh.handle()->grant_id));
        party.tell("revoked");
        party.hear();
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte byte{9};
        const LocalView view = view_of(*engine, &byte, 1);
        put_and_wait(*engine, view, target);
        party.meet();
        EXPECT_EQ(move(*engine, Direction::kPut, view, target).code(), Code::kRevoked);
        party.tell("end");
      });
}

TEST_P(GrantTest, RevokedOneByOneWhileTenOthersCarryTrafficThatIsRightAndGoesOn) {
  constexpr int kOthers = 10;
  const int count = rounds(50);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, (kOthers + 1) * kSlice);
        std::vector<Grant> others;
        for (int i = 0; i < kOthers; ++i) {
          others.push_back(grant_slice(*engine, memory, i, Access::kBoth));
          party.tell(text_of(others.back()));
        }
        std::byte* const mine = memory.data() + kOthers * kSlice;
        for (int round = 0; round < count; ++round) {
          const Grant grant = grant_slice(*engine, memory, kOthers, Access::kPut);
          party.tell(text_of(grant));
          party.hear();  // It is being written to.
          std::this_thread::sleep_for(std::chrono::microseconds(137 * (round % 16)));
          const Status revoked = grant.revoke(in_seconds(30), Force::kNo);
          ASSERT_TRUE(revoked.is_ok()) << revoked.to_string();
          std::memset(mine, 0x5a, kSlice);
          party.meet();  // The writer has seen its end.
          ASSERT_TRUE(std::all_of(mine, mine + kSlice,
                                  [](std::byte each) { return each == std::byte{0x5a}; }))
              << "round " << round;
        }
        party.tell("over");
        party.hear();
        EXPECT_EQ(engine->stats().grants, static_cast<std::uint64_t>(kOthers));
        EXPECT_EQ(engine->stats().quarantined_bytes, 0u);
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        std::vector<RemoteView> others;
        for (int i = 0; i < kOthers; ++i) others.push_back(open_handle(party.hear()));
        std::atomic<bool> is_over{false};
        std::atomic<std::uint64_t> verified{0};
        std::thread traffic([&] {
          std::vector<std::byte> out(kSlice), back(kSlice);
          const LocalView source = view_of(*engine, out.data(), kSlice);
          const LocalView target = view_of(*engine, back.data(), kSlice);
          for (std::uint32_t seed = 0; !is_over.load(); ++seed) {
            const RemoteView& remote = others[seed % kOthers];
            std::memset(out.data(), static_cast<int>(seed % 251), kSlice);
            const Status put = move(*engine, Direction::kPut, source, remote);
            ASSERT_TRUE(put.is_ok()) << put.to_string();
            const Status got = move(*engine, Direction::kGet, target, remote);
            ASSERT_TRUE(got.is_ok()) << got.to_string();
            ASSERT_EQ(out, back);
            ++verified;
          }
        });
        std::vector<std::byte> bytes(kSlice, std::byte{1});
        const LocalView source = view_of(*engine, bytes.data(), kSlice);
        for (int round = 0; round < count; ++round) {
          const std::uint64_t before = verified.load();
          const RemoteView remote = open_handle(party.hear());
          Status status = move(*engine, Direction::kPut, source, remote);
          party.tell("writing");
          while (status.is_ok()) status = move(*engine, Direction::kPut, source, remote);
          EXPECT_EQ(status.code(), Code::kRevoked) << status.to_string();
          // The others have not stopped.
          const std::int64_t patience = in_seconds(20);
          while (verified.load() == before && in_seconds(0) < patience) std::this_thread::yield();
          EXPECT_GT(verified.load(), before);
          party.meet();
        }
        party.hear();
        is_over.store(true);
        traffic.join();
        party.tell("over");
      });
}

// What the owner writes after its revoke has returned is its own: no put changes it, and no get
// brings it along.
void revoke_against(Party& party, std::int64_t nbytes, int count) {
  auto engine = party.make_engine();
  OwnedMemory memory = make_memory(*engine, static_cast<std::uint64_t>(nbytes));
  for (int round = 0; round < count; ++round) {
    std::memset(memory.data(), 0x11, static_cast<std::size_t>(nbytes));
    const Grant grant = engine->grant(whole(memory), Access::kBoth).take();
    party.tell(text_of(grant));
    party.hear();
    std::this_thread::sleep_for(std::chrono::microseconds(61 * (round % 32)));
    const Status revoked = grant.revoke(in_seconds(30), Force::kNo);
    ASSERT_TRUE(revoked.is_ok()) << revoked.to_string();
    std::memset(memory.data(), 0x5a, static_cast<std::size_t>(nbytes));
    party.meet();
    std::byte* const end = memory.data() + nbytes;
    std::byte* const late = std::find_if(
        memory.data(), end, [](std::byte each) { return each != std::byte{0x5a}; });
    ASSERT_EQ(late, end) << "round " << round << ": byte " << late - memory.data();
  }
}

void hammer(Party& party, std::int64_t nbytes, int count, Direction direction) {
  auto engine = party.make_engine();
  std::vector<std::byte> bytes(static_cast<std::size_t>(nbytes));
  const LocalView local = view_of(*engine, bytes.data(), bytes.size());
  for (int round = 0; round < count; ++round) {
    const RemoteView remote = open_handle(party.hear());
    std::memset(bytes.data(), 0x22, bytes.size());
    ASSERT_TRUE(engine->connect(remote)->wait(in_seconds(30)).is_ok());
    party.tell("begun");
    Status status;
    while (status.is_ok()) status = move(*engine, direction, local, remote);
    EXPECT_EQ(status.code(), Code::kRevoked) << status.to_string();
    if (direction == Direction::kGet) {
      const auto foreign = std::find(bytes.begin(), bytes.end(), std::byte{0x5a});
      ASSERT_EQ(foreign, bytes.end()) << "round " << round;
    }
    party.meet();
  }
}

TEST_P(GrantTest, NoPutChangesAByteOnceItsRevokeHasReturned) {
  const int count = rounds(50);
  run([&](Party& party) { revoke_against(party, 8 << 20, count); },
      [&](Party& party) { hammer(party, 8 << 20, count, Direction::kPut); });
}

TEST_P(GrantTest, NoGetReadsAByteOnceItsRevokeHasReturned) {
  const int count = rounds(50);
  run([&](Party& party) { revoke_against(party, 8 << 20, count); },
      [&](Party& party) { hammer(party, 8 << 20, count, Direction::kGet); });
}

TEST_P(GrantTest, ARevokeWaitsForNobodyWhenNobodyIsWithin) {
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 4096);
        const Grant grant = engine->grant(whole(memory), Access::kPut).take();
        party.tell(text_of(grant));
        party.hear();
        // No patience at all is enough, unless the peer must be asked.
        const std::int64_t by = GetParam().sut.is_remote ? in_seconds(10) : 0;
        EXPECT_TRUE(grant.revoke(by, Force::kNo).is_ok());
        EXPECT_TRUE(grant.revoke(by, Force::kNo).is_ok());
        EXPECT_TRUE(memory.region.revoke(by, Force::kYes).is_ok());
        EXPECT_EQ(engine->stats().peers, 1u);
        party.tell("end");
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::byte source[4096] = {};
        put_and_wait(*engine, view_of(*engine, source, sizeof source), target);
        party.meet();
      });
}

TEST_P(GrantTest, AfterARevokeOfTheRegionItGivesOutAnotherHandle) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        const std::string before = memory.handle_text();
        party.tell(before);
        ASSERT_TRUE(memory.region.revoke(in_seconds(30), Force::kNo).is_ok());
        const std::string after = memory.handle_text();
        EXPECT_NE(before, after);
        party.tell(after);
        party.hear();
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView old = open_handle(party.hear());
        const RemoteView fresh = open_handle(party.hear());
        std::byte source[64] = {};
        const LocalView view = view_of(*engine, source, sizeof source);
        EXPECT_EQ(move(*engine, Direction::kPut, view, old).code(), Code::kRevoked);
        put_and_wait(*engine, view, fresh);
        party.tell("end");
      });
}

KVZC_CONFORMANCE(GrantTest);

}  // namespace
}  // namespace kvzc::conformance

// A get reads exactly the bytes asked for, whatever the shape; its tag tells the owner that the
// last one was read. Tags also go alone.
#include <cstring>
#include <thread>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

class GetTest : public Conformance {};

constexpr std::uint32_t kSeed = 3;

void get_and_wait(Engine& engine, const LocalView& target, const RemoteView& source,
                  std::optional<std::string_view> notify = std::nullopt) {
  TransferOptions options;
  options.notify = notify;
  const TransferItem item{&target, &source};
  Result<Transfer> transfer = engine.get({&item, 1}, options, in_seconds(30));
  ASSERT_TRUE(transfer.is_ok()) << transfer.status().to_string();
  ASSERT_TRUE(transfer->wait(in_seconds(30)).is_ok());
  ASSERT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
}

TEST_P(GetTest, BytesOfEverySizeArriveAndNothingBesides) {
  constexpr std::uint64_t kMost = (3 << 20) + 77;
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kMost);
        fill(memory.data(), kMost, kSeed);
        party.tell(memory.handle_text());
        party.hear();
        EXPECT_EQ(first_difference(memory.data(), kMost, kSeed), -1);  // Read, not written.
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView source = open_handle(party.hear());
        std::vector<std::byte> bytes(kMost + 128);
        for (const std::int64_t size : {std::int64_t{1}, std::int64_t{7}, std::int64_t{4096},
                                        std::int64_t{65537}, std::int64_t{1 << 20},
                                        static_cast<std::int64_t>(kMost)}) {
          std::memset(bytes.data(), 0x77, bytes.size());
          const LocalView target =
              view_of(*engine, bytes.data() + 64, static_cast<std::uint64_t>(size));
          get_and_wait(*engine, target, slice(source, 0, size));
          ASSERT_EQ(first_difference(bytes.data() + 64, static_cast<std::uint64_t>(size), kSeed), -1)
              << size;
          for (std::size_t i = 0; i < 64; ++i) {
            ASSERT_EQ(bytes[i], std::byte{0x77});
            ASSERT_EQ(bytes[64 + static_cast<std::size_t>(size) + i], std::byte{0x77});
          }
        }
        party.tell("end");
      });
}

TEST_P(GetTest, ScatteredBlocksComeInTheOrderAskedFor) {
  constexpr std::int64_t kBlock = 4096 + 8;
  constexpr std::int64_t kBlocks = 64;
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBlock * kBlocks);
        for (std::int64_t block = 0; block < kBlocks; ++block) {
          std::memset(memory.data() + block * kBlock, static_cast<int>(block + 1), kBlock);
        }
        party.tell(memory.handle_text());
        party.hear();
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView all = open_handle(party.hear());
        std::vector<RemoteView> sources;
        std::vector<LocalView> targets;
        std::vector<std::byte> bytes(kBlock * kBlocks);
        const LocalView whole = view_of(*engine, bytes.data(), bytes.size());
        for (std::int64_t i = 0; i < kBlocks; ++i) {
          const std::int64_t from = (i * 29 + 5) % kBlocks;
          sources.push_back(slice(all, from * kBlock, (from + 1) * kBlock));
          targets.push_back(slice(whole, i * kBlock, (i + 1) * kBlock));
        }
        std::vector<TransferItem> items;
        for (std::size_t i = 0; i < sources.size(); ++i) items.push_back({&targets[i], &sources[i]});
        const Transfer transfer = engine->get(items, {}, in_seconds(30)).take();
        ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
        ASSERT_TRUE(transfer.status().is_ok()) << transfer.status().to_string();
        for (std::int64_t i = 0; i < kBlocks; ++i) {
          const auto value = static_cast<std::byte>((i * 29 + 5) % kBlocks + 1);
          for (std::int64_t at = 0; at < kBlock; ++at) {
            ASSERT_EQ(bytes[static_cast<std::size_t>(i * kBlock + at)], value) << i << " " << at;
          }
        }
        party.tell("end");
      });
}

TEST_P(GetTest, NoByteGoesIntoTwoTargets) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 256);
        party.tell(memory.handle_text());
        party.hear();
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView source = open_handle(party.hear());
        std::byte bytes[256];
        const LocalView whole = view_of(*engine, bytes, sizeof bytes);
        const LocalView first = slice(whole, 0, 100), second = slice(whole, 99, 199);
        const RemoteView a = slice(source, 0, 100), b = slice(source, 100, 200);
        const TransferItem items[] = {{&first, &a}, {&second, &b}};
        EXPECT_EQ(engine->try_get(items, {}).status().code(), Code::kInvalidArgument);
        // Two may read the same bytes.
        const LocalView apart = slice(whole, 100, 200);
        const TransferItem twice[] = {{&first, &a}, {&apart, &a}};
        const Result<Transfer> transfer = engine->try_get(twice, {});
        ASSERT_TRUE(transfer.is_ok()) << transfer.status().to_string();
        ASSERT_TRUE(transfer->wait(in_seconds(30)).is_ok());
        EXPECT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
        party.tell("end");
      });
}

TEST_P(GetTest, ItsTagComesWhenTheSourceMayChange) {
  constexpr std::uint64_t kBytes = 4 << 20;
  const int count = rounds(50);
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, kBytes);
        std::memset(memory.data(), 0, kBytes);
        party.tell(memory.handle_text());
        for (int round = 0; round < count; ++round) {
          const auto read = engine->wait_arrivals("read", 1, nullptr, in_seconds(30));
          ASSERT_TRUE(read.is_ok()) << read.status().to_string();
          ASSERT_EQ((*read)[0].code, Code::kOk);
          // At once: whoever still reads sees it.
          std::memset(memory.data(), round + 1, kBytes);
          party.tell("changed");
        }
        party.hear();
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView source = open_handle(party.hear());
        std::vector<std::byte> bytes(kBytes);
        const LocalView target = view_of(*engine, bytes.data(), kBytes);
        for (int round = 0; round < count; ++round) {
          get_and_wait(*engine, target, source, "read");
          for (const std::byte each : bytes) ASSERT_EQ(each, static_cast<std::byte>(round));
          party.hear();
        }
        party.tell("end");
      });
}

TEST_P(GetTest, TagsGoAloneToAHandlesOwnerAndBackToThePeer) {
  run(
      [](Party& party) {
        auto engine = party.make_engine();
        OwnedMemory memory = make_memory(*engine, 64);
        party.tell(memory.handle_text());
        const auto hello = engine->wait_arrivals("hello", 1, nullptr, in_seconds(30));
        ASSERT_TRUE(hello.is_ok()) << hello.status().to_string();
        EXPECT_EQ((*hello)[0].code, Code::kOk);
        TransferOptions options;
        options.notify = "answer";
        const Result<Transfer> sent = engine->try_notify(*(*hello)[0].peer, options);
        ASSERT_TRUE(sent.is_ok()) << sent.status().to_string();
        ASSERT_TRUE(sent->wait(in_seconds(30)).is_ok());
        EXPECT_TRUE(sent->status().is_ok());
        EXPECT_EQ(sent->nbytes(), 0u);
        party.hear();
        const std::int64_t patience = in_seconds(5);
        while (engine->stats().peers != 0 && in_seconds(0) < patience) std::this_thread::yield();
        EXPECT_EQ(engine->try_notify(*(*hello)[0].peer, options).status().code(), Code::kPeerLost);
      },
      [](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        TransferOptions options;
        options.notify = "hello";
        const Result<Transfer> sent = engine->try_notify(target, options);
        ASSERT_TRUE(sent.is_ok()) << sent.status().to_string();
        ASSERT_TRUE(sent->wait(in_seconds(30)).is_ok());
        EXPECT_TRUE(sent->status().is_ok()) << sent->status().to_string();
        EXPECT_TRUE(engine->wait_arrivals("answer", 1, nullptr, in_seconds(30)).is_ok());
        EXPECT_TRUE(engine->close(in_seconds(30)).is_ok());
        party.tell("end");
      });
}

KVZC_CONFORMANCE(GetTest);

}  // namespace
}  // namespace kvzc::conformance

// Exact bytes: what is put lands, and nothing beside it changes.
#include <algorithm>

#include "conformance/peer_group.h"

namespace kvzc::conformance {
namespace {

constexpr std::uint64_t kGuardBytes = 4096;
constexpr std::uint32_t kBefore = 1;
constexpr std::uint32_t kSource = 2;

class PutTest : public Conformance {
 protected:
  // Puts `nbytes` between two guards and checks all three, as the owner sees them.
  void put_between_guards(std::uint64_t nbytes, std::uint64_t skew) {
    const std::uint64_t begin = kGuardBytes + skew;
    const std::uint64_t total = begin + nbytes + kGuardBytes;
    run(
        [&](Party& party) {
          auto engine = party.make_engine();
          OwnedMemory memory = make_memory(*engine, total);
          fill(memory.data(), total, kBefore);
          party.tell(memory.handle_text());
          party.hear();
          for (std::uint64_t i = 0; i < total; ++i) {
            const bool is_inside = i >= begin && i < begin + nbytes;
            const std::byte expected =
                is_inside ? pattern(i - begin, kSource) : pattern(i, kBefore);
            ASSERT_EQ(memory.data()[i], expected) << "at " << i << " of " << total;
          }
          party.tell("seen");
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          const RemoteView target = open_handle(party.hear());
          constexpr std::int64_t kSourceAt = 5;
          std::vector<std::byte> source(nbytes + 2 * kSourceAt);
          fill(source.data() + kSourceAt, nbytes, kSource);
          const LocalView view = view_of(*engine, source.data(), source.size());
          const auto at = static_cast<std::int64_t>(begin);
          const auto size = static_cast<std::int64_t>(nbytes);
          put_and_wait(*engine, slice(view, kSourceAt, kSourceAt + size),
                       slice(target, at, at + size));
          party.tell("done");
          party.hear();
        });
  }
};

TEST_P(PutTest, NoByteMovesNothing) { put_between_guards(0, 0); }
TEST_P(PutTest, OneByteLandsAlone) { put_between_guards(1, 0); }
TEST_P(PutTest, OneByteLandsAtAnOddPlace) { put_between_guards(1, 13); }
TEST_P(PutTest, AlmostAPageLands) { put_between_guards(4095, 0); }
TEST_P(PutTest, APageLands) { put_between_guards(4096, 0); }
TEST_P(PutTest, ALittleMoreThanAPageLands) { put_between_guards(4097, 1); }
TEST_P(PutTest, AnOddSizeOverManyChunksLands) { put_between_guards((1 << 20) + 4097, 63); }
TEST_P(PutTest, SixtyFourMebibytesLand) { put_between_guards(64 << 20, 1); }

class ScatterTest : public PutTest {
 protected:
  void scatter(std::int64_t block_bytes, const std::vector<std::int64_t>& source_ids,
               const std::vector<std::int64_t>& target_ids);
};

void ScatterTest::scatter(std::int64_t block_bytes, const std::vector<std::int64_t>& source_ids,
                          const std::vector<std::int64_t>& target_ids) {
  constexpr std::int64_t kBlocks = 64;
  const auto blocks = [&](std::byte* data) {
    TensorSpec spec;
    spec.dtype = DType::kUint8;
    spec.shape = {kBlocks, block_bytes};
    spec.strides_bytes = {block_bytes, 1};
    spec.data = spec.storage_data = data;
    spec.storage_nbytes = static_cast<std::uint64_t>(kBlocks * block_bytes);
    return spec;
  };
  const auto list = [](const std::vector<std::int64_t>& ids) {
    return Index(std::make_shared<const std::vector<std::int64_t>>(ids));
  };
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        auto allocation = allocate(*engine, static_cast<std::uint64_t>(kBlocks * block_bytes));
        fill(allocation->data(), allocation->nbytes(), kBefore);
        const TensorSpec spec = blocks(allocation->data());
        OwnedMemory memory{allocation, engine->register_memory({&spec, 1}).take()};
        party.tell(memory.handle_text());
        party.hear();
        for (std::int64_t block = 0; block < kBlocks; ++block) {
          const auto at = std::find(target_ids.begin(), target_ids.end(), block);
          for (std::int64_t i = 0; i < block_bytes; ++i) {
            const auto here = static_cast<std::uint64_t>(block * block_bytes + i);
            std::byte expected = pattern(here, kBefore);
            if (at != target_ids.end()) {
              const std::int64_t from =
                  source_ids[static_cast<std::size_t>(at - target_ids.begin())];
              expected = pattern(static_cast<std::uint64_t>(from * block_bytes + i), kSource);
            }
            ASSERT_EQ(memory.data()[here], expected) << "block " << block << " byte " << i;
          }
        }
        party.tell("seen");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(static_cast<std::size_t>(kBlocks * block_bytes));
        fill(source.data(), source.size(), kSource);
        const LocalView all = engine->find_or_borrow(blocks(source.data())).take();
        const Index from = list(source_ids);
        const Index to = list(target_ids);
        put_and_wait(*engine, all.index({&from, 1}).take(), target.index({&to, 1}).take());
        party.tell("done");
        party.hear();
      });
}

TEST_P(ScatterTest, ScatteredBlocksLandWhereTheirIdsSay) {
  scatter(3 * 1024 + 7, {3, 4, 5, 9, 9, 0, 63, 62}, {60, 61, 2, 7, 1, 33, 34, 35});
}

TEST_P(ScatterTest, LittleRunsThatFollowTheRestOfALargeOneLandToo) {
  scatter(1000, {10, 11, 12, 13, 14, 15, 3, 9, 50}, {20, 21, 22, 23, 24, 25, 1, 5, 7});
}

TEST_P(PutTest, RowsWithGapsLandRowByRow) {
  // Rows of 100 bytes, 100 apart at the source and 164 apart at the target, and the other way
  // round.
  constexpr std::int64_t kRows = 40;
  const auto rows = [](std::byte* data, std::int64_t pitch) {
    TensorSpec spec;
    spec.dtype = DType::kUint8;
    spec.shape = {kRows, 100};
    spec.strides_bytes = {pitch, 1};
    spec.data = spec.storage_data = data;
    spec.storage_nbytes = kRows * 164;
    return spec;
  };
  for (const auto& [source_pitch, target_pitch] : {std::pair(100, 164), std::pair(164, 100)}) {
    run(
        [&](Party& party) {
          auto engine = party.make_engine();
          auto allocation = allocate(*engine, kRows * 164);
          fill(allocation->data(), allocation->nbytes(), kBefore);
          const TensorSpec spec = rows(allocation->data(), target_pitch);
          OwnedMemory memory{allocation, engine->register_memory({&spec, 1}).take()};
          party.tell(memory.handle_text());
          party.hear();
          for (std::int64_t i = 0; i < kRows * 164; ++i) {
            const std::int64_t row = i / target_pitch;
            const std::int64_t column = i % target_pitch;
            const bool is_inside = row < kRows && column < 100;
            const std::byte expected =
                is_inside
                    ? pattern(static_cast<std::uint64_t>(row * source_pitch + column), kSource)
                    : pattern(static_cast<std::uint64_t>(i), kBefore);
            ASSERT_EQ(memory.data()[i], expected) << "row " << row << " byte " << column;
          }
          party.tell("seen");
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          const RemoteView target = open_handle(party.hear());
          std::vector<std::byte> source(kRows * 164);
          fill(source.data(), source.size(), kSource);
          const LocalView view = engine->find_or_borrow(rows(source.data(), source_pitch)).take();
          put_and_wait(*engine, view, target);
          party.tell("done");
          party.hear();
        });
  }
}

TEST_P(PutTest, TensorsOfAGroupAndSeveralItemsLandInTheirOwnMemory) {
  constexpr std::uint64_t kEach = 10'000;
  const std::vector<std::string> names = {"k", "v", "w"};
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        std::vector<std::shared_ptr<TestMemory>> allocations;
        std::vector<TensorSpec> specs;
        for (const std::string& name : names) {
          allocations.push_back(allocate(*engine, kEach));
          TensorSpec spec;
          spec.name = name;
          spec.shape = {kEach};
          spec.strides_bytes = {1};
          spec.data = spec.storage_data = allocations.back()->data();
          spec.storage_nbytes = kEach;
          fill(spec.data, kEach, kBefore);
          specs.push_back(spec);
        }
        OwnedMemory memory{allocations[0], engine->register_memory(specs).take()};
        party.tell(memory.handle_text());
        party.hear();
        for (std::uint32_t i = 0; i < 3; ++i) {
          EXPECT_EQ(first_difference(allocations[i]->data(), kEach, kSource + i), -1) << names[i];
        }
        party.meet();
        // Three items of one transfer, in another order.
        for (std::uint32_t i = 0; i < 3; ++i) {
          EXPECT_EQ(first_difference(allocations[i]->data(), kEach, kSource + 2 - i), -1)
              << names[i];
        }
        party.tell("seen");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::vector<std::byte>> sources(3, std::vector<std::byte>(kEach));
        std::vector<LocalView> views;
        LocalView group;
        auto memory = std::make_shared<RegionMemory>();
        for (std::uint32_t i = 0; i < 3; ++i) {
          fill(sources[i].data(), kEach, kSource + i);
          views.push_back(view_of(*engine, sources[i].data(), kEach));
          memory->storages.push_back(views[i].memory->storages[0]);
          group.view.tensors.push_back(views[i].view.tensors[0]);
          group.view.tensors[i].storage = i;
        }
        group.view.names = names;
        group.memory = memory;
        put_and_wait(*engine, group, target);
        party.tell("done");
        party.hear();
        std::vector<RemoteView> targets;
        for (const std::string& name : names) {
          const Index index = name;
          targets.push_back(target.index({&index, 1}).take());
        }
        const TransferItem items[] = {
            {&views[2], &targets[0]}, {&views[1], &targets[1]}, {&views[0], &targets[2]}};
        const Transfer transfer = engine->put(items, {}, in_seconds(30)).take();
        ASSERT_TRUE(transfer.wait(in_seconds(30)).is_ok());
        EXPECT_TRUE(transfer.status().is_ok()) << transfer.status().to_string();
        party.tell("done");
        party.hear();
      });
}

KVZC_CONFORMANCE(PutTest);
KVZC_CONFORMANCE(ScatterTest);

}  // namespace
}  // namespace kvzc::conformance

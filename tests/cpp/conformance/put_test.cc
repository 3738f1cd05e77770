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
            const std::byte expected = is_inside ? pattern(i - begin, kSource) : pattern(i, kBefore);
            ASSERT_EQ(memory.data()[i], expected) << "at " << i << " of " << total;
          }
          party.tell("seen");
        },
        [&](Party& party) {
          auto engine = party.make_engine();
          const RemoteView target = open_handle(party.hear());
          std::vector<std::byte> source(std::max<std::uint64_t>(nbytes, 1));
          fill(source.data(), nbytes, kSource);
          const LocalView view = view_of(*engine, source.data(), source.size());
          const auto at = static_cast<std::int64_t>(begin);
          const auto size = static_cast<std::int64_t>(nbytes);
          put_and_wait(*engine, slice(view, 0, size), slice(target, at, at + size));
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

TEST_P(PutTest, ScatteredBlocksLandWhereTheirIdsSay) {
  constexpr std::int64_t kBlocks = 64;
  constexpr std::int64_t kBlockBytes = 3 * 1024 + 7;
  const std::vector<std::int64_t> source_ids = {3, 4, 5, 9, 9, 0, 63, 62};
  const std::vector<std::int64_t> target_ids = {60, 61, 2, 7, 1, 33, 34, 35};
  const auto blocks = [](std::byte* data) {
    TensorSpec spec;
    spec.dtype = DType::kUint8;
    spec.shape = {kBlocks, kBlockBytes};
    spec.strides_bytes = {kBlockBytes, 1};
    spec.data = spec.storage_data = data;
    spec.storage_nbytes = kBlocks * kBlockBytes;
    return spec;
  };
  const auto list = [](const std::vector<std::int64_t>& ids) {
    return Index(std::make_shared<const std::vector<std::int64_t>>(ids));
  };
  run(
      [&](Party& party) {
        auto engine = party.make_engine();
        auto allocation = engine->allocator().allocate(kBlocks * kBlockBytes).take();
        fill(allocation->data(), allocation->nbytes(), kBefore);
        const TensorSpec spec = blocks(allocation->data());
        OwnedMemory memory{allocation, engine->register_memory({&spec, 1}).take()};
        party.tell(memory.handle_text());
        party.hear();
        for (std::int64_t block = 0; block < kBlocks; ++block) {
          const auto at = std::find(target_ids.begin(), target_ids.end(), block);
          for (std::int64_t i = 0; i < kBlockBytes; ++i) {
            const auto here = static_cast<std::uint64_t>(block * kBlockBytes + i);
            std::byte expected = pattern(here, kBefore);
            if (at != target_ids.end()) {
              const std::int64_t from = source_ids[static_cast<std::size_t>(at - target_ids.begin())];
              expected = pattern(static_cast<std::uint64_t>(from * kBlockBytes + i), kSource);
            }
            ASSERT_EQ(memory.data()[here], expected) << "block " << block << " byte " << i;
          }
        }
        party.tell("seen");
      },
      [&](Party& party) {
        auto engine = party.make_engine();
        const RemoteView target = open_handle(party.hear());
        std::vector<std::byte> source(kBlocks * kBlockBytes);
        fill(source.data(), source.size(), kSource);
        const LocalView all = engine->find_or_borrow(blocks(source.data())).take();
        const Index from = list(source_ids);
        const Index to = list(target_ids);
        put_and_wait(*engine, all.index({&from, 1}).take(), target.index({&to, 1}).take());
        party.tell("done");
        party.hear();
      });
}

KVZC_CONFORMANCE(PutTest);

}  // namespace
}  // namespace kvzc::conformance

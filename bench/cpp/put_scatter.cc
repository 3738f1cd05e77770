// put_scatter: many blocks from random places to random places in one put, the shape of a KV cache.
//
// Floors, measured in turns with it: the same blocks copied by a plain loop with the same number of
// threads and the same kernel; and by one thread with memcpy.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "cpp/harness.h"

namespace kvzc::bench {

void put_scatter(const Options& options, Report& report) {
  constexpr std::uint64_t kSeed = 12;
  struct Shape {
    std::int64_t blocks;
    std::int64_t block_bytes;
    Goal goal;
  };
  for (const Shape& shape : {Shape{1024, 4 << 10, {}}, Shape{4096, 32 << 10, of_floor(0.9)},
                             Shape{32768, 4 << 10, of_floor(0.9)}}) {
    // Twice as many blocks on either side, half of them used.
    const std::int64_t slots = 2 * shape.blocks;
    const auto total = static_cast<std::uint64_t>(slots * shape.block_bytes);
    if (total > 2 * options.most_bytes) continue;
    TwoProcesses processes(total);
    Engine& engine = processes.engine();
    const Memory source(engine, total, MemoryKind::kPrivate);
    const Memory floor_target(engine, total);
    fill_random_bytes(source.data(), total, kSeed);
    std::memset(floor_target.data(), 1, total);

    std::mt19937_64 random(5);
    const auto pick = [&] {
      std::vector<std::int64_t> ids(static_cast<std::size_t>(slots));
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random);
      ids.resize(static_cast<std::size_t>(shape.blocks));
      return std::make_shared<const std::vector<std::int64_t>>(std::move(ids));
    };
    const IndexList from_ids = pick();
    const IndexList to_ids = pick();

    TensorSpec spec = source.spec();
    spec.shape = {slots, shape.block_bytes};
    spec.strides_bytes = {shape.block_bytes, 1};
    const LocalView all = take(engine.find_or_borrow(spec));
    // The handle is of one axis; the same memory as blocks.
    RemoteView blocks = processes.target();
    blocks.view.tensors[0].axes = {{slots, shape.block_bytes, nullptr},
                                   {shape.block_bytes, 1, nullptr}};
    std::uint64_t runs = 0;
    const auto put = [&] {
      // What a caller does per request: index both sides, put, wait.
      const Index from_index = from_ids;
      const Index to_index = to_ids;
      const LocalView from = all.index({&from_index, 1}).take();
      const RemoteView to = blocks.index({&to_index, 1}).take();
      const TransferItem item{&from, &to};
      const Transfer transfer = engine.try_put({&item, 1}, {}).take();
      (void)transfer.wait(INT64_MAX);
      runs = transfer.run_count();
    };
    std::vector<FloorCopier::Copy> copies;
    std::vector<TwoProcesses::Piece> pieces;
    for (std::size_t i = 0; i < from_ids->size(); ++i) {
      const auto at = static_cast<std::uint64_t>((*from_ids)[i] * shape.block_bytes);
      const auto to = static_cast<std::uint64_t>((*to_ids)[i] * shape.block_bytes);
      const auto nbytes = static_cast<std::uint64_t>(shape.block_bytes);
      copies.push_back({floor_target.data() + to, source.data() + at, nbytes});
      pieces.push_back({to, at, nbytes});
    }
    FloorCopier copier(2);
    copier.prepare(copies, true, TransportTuning().chunk_bytes);
    const auto plain = [&] {
      for (const auto& copy : copies) std::memcpy(copy.target, copy.source, copy.nbytes);
      asm volatile("" ::: "memory");
    };
    const Medians medians =
        measure(options.seconds_per_row, {{put}, copier.operation(), {plain}}, 1);
    processes.verify(kSeed, total, pieces);
    report.add("put_scatter",
               std::to_string(shape.blocks) + " x " +
                   size_text(static_cast<std::uint64_t>(shape.block_bytes)),
               static_cast<std::uint64_t>(shape.blocks * shape.block_bytes), medians, shape.goal,
               runs);
  }
}

}  // namespace kvzc::bench

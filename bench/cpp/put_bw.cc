// put_bw: one contiguous put and its wait, by size.
//
// Floors, measured in turns with it: a plain copy of the same bytes with the same number of threads
// and the same kernel into memory of the same kind; and one memcpy.

#include <cstring>

#include "base/copy.h"
#include "cpp/harness.h"

namespace kvzc::bench {

void put_bw(const Options& options, Report& report) {
  constexpr std::uint64_t kSeed = 11, kLeastWithGoal = 16u << 20;
  TwoProcesses processes(options.most_bytes);
  Engine& engine = processes.engine();
  const Memory source(engine, options.most_bytes, MemoryKind::kPrivate);
  const Memory floor_target(engine, options.most_bytes);
  fill_random_bytes(source.data(), options.most_bytes, kSeed);
  std::memset(floor_target.data(), 1, options.most_bytes);
  const TransportTuning tuning;
  FloorCopier copier(2);

  for (const std::uint64_t nbytes :
       {std::uint64_t{64} << 10, std::uint64_t{1} << 20, std::uint64_t{16} << 20,
        std::uint64_t{256} << 20, std::uint64_t{1} << 30}) {
    if (nbytes > options.most_bytes) continue;
    const LocalView from = take(engine.find_or_borrow(source.spec_of(0, nbytes)));
    const RemoteView to = bytes_of(processes.target(), 0, nbytes);
    const auto plain = [&] {
      std::memcpy(floor_target.data(), source.data(), nbytes);
      asm volatile("" ::: "memory");
    };
    // With the same threads: a small put is copied by one.
    const auto alone = [&] {
      copy_bytes(floor_target.data(), source.data(), nbytes, false);
      asm volatile("" ::: "memory");
    };
    copier.prepare({{floor_target.data(), source.data(), nbytes}}, nbytes >= tuning.streaming_bytes,
                   tuning.chunk_bytes);
    const Operation floor = nbytes <= tuning.inline_bytes ? Operation{alone} : copier.operation();
    const Medians medians = measure(options.seconds_per_row,
                                    {{[&] { put_and_wait(engine, from, to); }}, floor, {plain}}, 1);
    processes.verify(kSeed, nbytes, {{0, 0, nbytes}});
    report.add("put_bw", size_text(nbytes), nbytes, medians,
               nbytes >= kLeastWithGoal ? of_floor(0.95) : Goal{});
  }
}

}  // namespace kvzc::bench

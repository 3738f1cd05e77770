// put_bw: one contiguous put and its wait, by size.
//
// Floors, measured in turns with it: a plain copy of the same bytes with the same number of threads
// and the same kernel into memory of the same kind; and one memcpy.

#include <cstring>

#include "base/clock.h"
#include "base/copy.h"
#include "base/shared_memory.h"
#include "cpp/harness.h"

namespace kvzc::bench {
void put_bw(const Options& options, Report& report) {
  constexpr std::uint64_t kSeed = 11;
  TwoProcesses processes(options.most_bytes);
  std::vector<std::byte> source(options.most_bytes);
  fill_random_bytes(source.data(), source.size(), kSeed);
  Result<SharedMemory> floor_target = SharedMemory::create("kvzc-bench-floor", options.most_bytes);
  if (!floor_target.is_ok()) return;
  std::memset(floor_target->data(), 1, floor_target->nbytes());
  const TransportTuning tuning;
  FloorCopier copier(2);

  for (const std::uint64_t nbytes :
       {std::uint64_t{8}, std::uint64_t{64}, std::uint64_t{4} << 10, std::uint64_t{64} << 10,
        std::uint64_t{1} << 20, std::uint64_t{16} << 20, std::uint64_t{256} << 20,
        std::uint64_t{1} << 30}) {
    if (nbytes > options.most_bytes) continue;
    TensorSpec spec;
    spec.shape = {static_cast<std::int64_t>(nbytes)};
    spec.strides_bytes = {1};
    spec.data = spec.storage_data = source.data();
    spec.storage_nbytes = nbytes;
    const LocalView from = processes.engine().find_or_borrow(spec).take();
    const Index index = Slice{0, static_cast<std::int64_t>(nbytes), std::nullopt};
    const RemoteView to = processes.target().index({&index, 1}).take();
    const TransferItem item{&from, &to};
    const auto put = [&] {
      const Transfer transfer = processes.engine().try_put({&item, 1}, {}).take();
      (void)transfer.wait(INT64_MAX);
    };
    // With the same threads: a small put is copied by one.
    const bool is_small = nbytes <= tuning.inline_bytes;
    const bool streaming = nbytes >= tuning.streaming_bytes;
    copier.prepare({{floor_target->data(), source.data(), nbytes}}, streaming, tuning.chunk_bytes);
    const auto floor = [&] {
      if (is_small) {
        copy_bytes(floor_target->data(), source.data(), nbytes, false);
        asm volatile("" ::: "memory");
      } else {
        copier.copy();
      }
    };
    const auto plain = [&] {
      std::memcpy(floor_target->data(), source.data(), nbytes);
      asm volatile("" ::: "memory");
    };
    const Medians medians =
        measure(options.seconds_per_row,
                {{put}, {floor, [&] { copier.wake(); }, [&] { copier.rest(); }}, {plain}},
                nbytes <= 4096 ? 1000 : 1);
    processes.verify(kSeed, nbytes, {{0, 0, nbytes}});
    report.add({"put_bw", size_text(nbytes), nbytes, 1, medians.samples, medians.p50[0],
                medians.p90[0], medians.p50[1], medians.p50[2]});
  }
}

}  // namespace kvzc::bench

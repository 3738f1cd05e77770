// put_lat: one small put and its wait, and one small get, into memory that is mapped. Each process
// keeps to a core.
//
// Floor, measured in turns with it: the same bytes copied by a plain loop into memory of the same
// kind.

#include <cstring>

#include "base/copy.h"
#include "cpp/harness.h"

namespace kvzc::bench {

void put_lat(const Options& options, Report& report) {
  constexpr std::uint64_t kSeed = 13, kMostBytes = 4 << 10;
  constexpr std::uint32_t kRepeats = 1000;
  TwoProcesses processes(kMostBytes, MemoryKind::kShared, Cores::kOneEach);
  Engine& engine = processes.engine();
  const Memory memory(engine, kMostBytes), floor_memory(engine, kMostBytes);
  const Region region = register_one(engine, memory.spec());
  const LocalView local = take(region.view());
  fill_random_bytes(memory.data(), kMostBytes, kSeed);

  for (const std::uint64_t nbytes : {std::uint64_t{8}, std::uint64_t{64}, kMostBytes}) {
    const LocalView from = bytes_of(local, 0, nbytes);
    const RemoteView to = bytes_of(processes.target(), 0, nbytes);
    const auto floor = [&] {
      copy_bytes(floor_memory.data(), memory.data(), nbytes, false);
      asm volatile("" ::: "memory");
    };
    const Medians medians = measure(options.seconds_per_row,
                                    {{[&] { put_and_wait(engine, from, to); }}, {floor}}, kRepeats);
    processes.verify(kSeed, nbytes, {{0, 0, nbytes}});
    report.add("put_lat", size_text(nbytes), nbytes, medians,
               nbytes == 8 ? within_ns(120) : Goal{});
  }

  constexpr std::uint64_t kGetBytes = 8;
  const LocalView to = bytes_of(local, kMostBytes / 2, kGetBytes);
  const RemoteView from = bytes_of(processes.target(), 0, kGetBytes);
  const auto get = [&] {
    const TransferItem item{&to, &from};
    const Transfer transfer = engine.try_get({&item, 1}, {}).take();
    (void)transfer.wait(INT64_MAX);
  };
  const auto floor = [&] {
    copy_bytes(memory.data() + kMostBytes / 2 + kGetBytes, floor_memory.data(), kGetBytes, false);
    asm volatile("" ::: "memory");
  };
  const Medians medians = measure(options.seconds_per_row, {{get}, {floor}}, kRepeats);
  if (std::memcmp(memory.data() + kMostBytes / 2, memory.data(), kGetBytes) != 0) {
    die("the bytes are not those that the owner has");
  }
  report.add("put_lat", "get " + size_text(kGetBytes), kGetBytes, medians);
}

}  // namespace kvzc::bench

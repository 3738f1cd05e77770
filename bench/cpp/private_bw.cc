// private_bw: one contiguous put and its wait into ordinary memory of the other process, by size.
//
// Floor, measured in turns with it: bare process_vm_writev of the same bytes into ordinary memory
// of the same process, by as many threads, in calls of the same size.

#include <sys/uio.h>

#include "cpp/harness.h"

namespace kvzc::bench {

void private_bw(const Options& options, Report& report) {
  constexpr std::uint64_t kSeed = 14;
  const std::uint64_t most_bytes = std::min<std::uint64_t>(options.most_bytes, 256u << 20);
  // The first half for kvzc, the second for the floor.
  TwoProcesses processes(2 * most_bytes, MemoryKind::kPrivate);
  Engine& engine = processes.engine();
  const Memory source(engine, most_bytes, MemoryKind::kPrivate);
  fill_random_bytes(source.data(), most_bytes, kSeed);
  const auto write = [pid = processes.owner_pid()](const FloorCopier::Copy& copy) {
    const iovec here{const_cast<std::byte*>(copy.source), copy.nbytes};
    const iovec there{copy.target, copy.nbytes};
    if (process_vm_writev(pid, &here, 1, &there, 1, 0) != static_cast<ssize_t>(copy.nbytes)) {
      die("process_vm_writev");
    }
  };
  auto* const floor_target = reinterpret_cast<std::byte*>(processes.owner_address() + most_bytes);
  const TransportTuning tuning;
  FloorCopier copier(2, write);

  for (const std::uint64_t nbytes :
       {std::uint64_t{4} << 10, std::uint64_t{64} << 10, std::uint64_t{1} << 20,
        std::uint64_t{16} << 20, std::uint64_t{256} << 20}) {
    if (nbytes > most_bytes) continue;
    const LocalView from = take(engine.find_or_borrow(source.spec_of(0, nbytes)));
    const RemoteView to = bytes_of(processes.target(), 0, nbytes);
    const FloorCopier::Copy all{floor_target, source.data(), nbytes};
    copier.prepare({all}, false, tuning.chunk_bytes);
    const Operation floor =
        nbytes <= tuning.inline_bytes ? Operation{[&] { write(all); }} : copier.operation();
    const Medians medians =
        measure(options.seconds_per_row, {{[&] { put_and_wait(engine, from, to); }}, floor},
                nbytes <= tuning.inline_bytes ? 10 : 1);
    processes.verify(kSeed, nbytes, {{0, 0, nbytes}, {most_bytes, 0, nbytes}});
    report.add("private_bw", size_text(nbytes), nbytes, medians, of_floor(0.9));
  }
}

}  // namespace kvzc::bench

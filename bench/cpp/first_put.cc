// first_put: the first put into memory of the other process that was just connected to, and its
// wait; right after connect() has ended, and a second later.
//
// Floor, measured behind each first put: the same put once more.

#include <time.h>

#include <algorithm>

#include "cpp/harness.h"

namespace kvzc::bench {

void first_put(const Options& options, Report& report) {
  constexpr std::uint64_t kSeed = 15;
  const std::uint64_t nbytes = options.most_bytes;
  TwoProcesses processes(nbytes);
  Engine& engine = processes.engine();
  const Memory memory(engine, nbytes, MemoryKind::kPrivate);
  const Region region = register_one(engine, memory.spec());
  const LocalView source = take(region.view());
  fill_random_bytes(memory.data(), nbytes, kSeed);
  const auto put = [&] { put_and_wait(engine, source, processes.target()); };

  struct Moment {
    const char* what;
    time_t seconds;
  };
  for (const Moment& moment : {Moment{"at once", 0}, Moment{"1 s later", 1}}) {
    const Operation first{put, [&] {
                            processes.renew();
                            const timespec pause{moment.seconds, 0};
                            nanosleep(&pause, nullptr);
                          }};
    const Medians medians = measure(options.seconds_per_row, {first, {put}}, 1);
    processes.verify(kSeed, nbytes, {{0, 0, nbytes}});
    report.add("first_put", size_text(nbytes) + ", " + moment.what, nbytes, medians, of_floor(0.8));
  }
}

}  // namespace kvzc::bench

// idle: processor time of this process while nothing happens: of an engine that is connected, and
// of a thread that waits for an arrival besides.

#include <time.h>

#include "cpp/harness.h"

namespace kvzc::bench {
namespace {

std::int64_t processor_ns() {
  timespec used;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<std::int64_t>(used.tv_sec) * 1'000'000'000 + used.tv_nsec;
}

Sampler processor_time_of(std::function<void()> run) {
  return [run = std::move(run)] {
    const std::int64_t start = processor_ns();
    run();
    return static_cast<double>(processor_ns() - start);
  };
}

}  // namespace

void idle(const Options& options, Report& report) {
  constexpr std::uint64_t kNbytes = 4 << 10, kSeed = 16;
  TwoProcesses processes(kNbytes);
  Engine& engine = processes.engine();
  // It has put something, so all that puts need is there.
  const Memory memory(engine, kNbytes);
  const Region region = register_one(engine, memory.spec());
  fill_random_bytes(memory.data(), kNbytes, kSeed);
  put_and_wait(engine, take(region.view()), processes.target());
  processes.verify(kSeed, kNbytes, {{0, 0, kNbytes}});

  const auto sleep = [] {
    const timespec pause{2, 0};
    nanosleep(&pause, nullptr);
  };
  const auto wait = [&] {
    const auto arrived = engine.wait_arrivals("never", 1, nullptr, clock_ns() + 1'000'000'000);
    if (arrived.is_ok() || arrived.status().code() != Code::kTimedOut) die("something has arrived");
  };
  report.add("idle", "cpu of 2 s, connected", 0,
             take_turns(options.seconds_per_row, {processor_time_of(sleep)}), within_ns(10e6));
  report.add("idle", "cpu of 1 s in wait_arrivals", 0,
             take_turns(options.seconds_per_row, {processor_time_of(wait)}), within_ns(10e6));
}

}  // namespace kvzc::bench

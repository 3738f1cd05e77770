// kvzc_bench_rdma [put_bw] [put_lat] [notify_lat] [put_scatter] [counts] [own_cost]
//                 [--device NAME] [--seconds S] [--json]
//
//   put_bw       contiguous puts, as many under way as the floor has WRITEs
//   put_lat      one put of 8 bytes and its wait
//   notify_lat   one way of a ping-pong of put + tag
//   put_scatter  1024 blocks of 4 KiB, random to random, in one put
//   counts       what kvzc and the floor ask of the device
//   own_cost     puts on a device that moves nothing: needs no hardware
//
// Two processes on one device. Each row stands beside the same transfer by bare verbs (raw_pair.h)
// on the same device, measured in turns with it; payloads are random and checked by the other
// process outside the timed window. The table goes to stderr, JSON lines (--json) to stdout.

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "cpp/harness.h"
#include "cpp/rdma/null_device.h"
#include "cpp/rdma/rig.h"
#include "cpp/rdma/verbs_watch.h"

namespace kvzc::bench {
namespace {

constexpr std::uint64_t kHalfBytes = 16u << 20;
constexpr Goal kBandwidthGoal = of_floor(0.95);
constexpr Goal kLatencyGoal = times_floor(1.15);
constexpr Goal kScatterGoal = of_floor(0.9);

struct Blocks {
  IndexList from, to;
  std::vector<RawPair::Piece> pieces;      // As kvzc puts them,
  std::vector<RawPair::Piece> raw_pieces;  // and as the floor writes them, into the other half.
};

// What the rows move, by either way.
class Moves {
 public:
  explicit Moves(Side& side) : side_(side) {}

  // Puts `count` messages, RawPair::kDepth of them under way.
  void put_each(const std::vector<std::pair<LocalView, RemoteView>>& slots, std::uint64_t count) {
    std::vector<Transfer> under_way(RawPair::kDepth);
    std::vector<bool> is_used(RawPair::kDepth);
    const auto finish = [&](std::size_t i) {
      (void)under_way[i].wait(INT64_MAX);
      if (!under_way[i].status().is_ok()) die("put: " + under_way[i].status().to_string());
    };
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::size_t at = i % RawPair::kDepth;
      if (is_used[at]) finish(at);
      const auto& [from, to] = slots[i % slots.size()];
      const TransferItem item{&from, &to};
      under_way[at] = take(side_.engine->try_put({&item, 1}, {}));
      is_used[at] = true;
    }
    for (std::uint64_t i = count; i < count + RawPair::kDepth; ++i) {
      if (is_used[i % RawPair::kDepth]) finish(i % RawPair::kDepth);
    }
  }

  std::vector<std::pair<LocalView, RemoteView>> slots_of(std::uint64_t nbytes) {
    std::vector<std::pair<LocalView, RemoteView>> out;
    for (std::uint64_t at = 0; at + nbytes <= kHalfBytes && out.size() < 256; at += nbytes) {
      const Index index = Slice{static_cast<std::int64_t>(at),
                                static_cast<std::int64_t>(at + nbytes), std::nullopt};
      out.emplace_back(take(side_.source.index({&index, 1})),
                       take(side_.target.index({&index, 1})));
    }
    return out;
  }

  // Writes of `count` messages, to where put_each() puts them but in the other half.
  static std::vector<RawPair::Piece> writes_of(std::uint64_t nbytes, std::uint64_t slots,
                                               std::uint64_t count, std::uint64_t target) {
    std::vector<RawPair::Piece> out;
    for (std::uint64_t i = 0; i < count; ++i) {
      out.push_back({i % slots * nbytes, target + i % slots * nbytes, nbytes});
    }
    return out;
  }

  static Blocks pick_blocks(std::int64_t count, std::int64_t block_bytes) {
    std::mt19937_64 random(5);
    const std::int64_t slots = 2 * count;
    const auto pick = [&] {
      std::vector<std::int64_t> ids(static_cast<std::size_t>(slots));
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random);
      ids.resize(static_cast<std::size_t>(count));
      return std::make_shared<const std::vector<std::int64_t>>(std::move(ids));
    };
    Blocks out;
    out.from = pick();
    out.to = pick();
    for (std::size_t i = 0; i < out.from->size(); ++i) {
      const auto from = static_cast<std::uint64_t>((*out.from)[i] * block_bytes);
      const auto to = static_cast<std::uint64_t>((*out.to)[i] * block_bytes);
      const auto nbytes = static_cast<std::uint64_t>(block_bytes);
      out.pieces.push_back({from, to, nbytes});
      out.raw_pieces.push_back({from, kHalfBytes + to, nbytes});
    }
    return out;
  }

  // Puts all blocks in one put, as a caller does: index both sides, put. Gives the transfer.
  Transfer put_blocks(const Blocks& blocks, std::int64_t block_bytes) {
    const auto slots = static_cast<std::int64_t>(2 * kHalfBytes) / block_bytes;
    LocalView all_from = side_.source;
    RemoteView all_to = side_.target;
    for (TensorView* each : {&all_from.view.tensors[0], &all_to.view.tensors[0]}) {
      each->axes = {{slots, block_bytes, nullptr}, {block_bytes, 1, nullptr}};
    }
    const Index from_index = blocks.from;
    const Index to_index = blocks.to;
    const LocalView from = take(all_from.index({&from_index, 1}));
    const RemoteView to = take(all_to.index({&to_index, 1}));
    const TransferItem item{&from, &to};
    return take(side_.engine->try_put({&item, 1}, {}));
  }

 private:
  Side& side_;
};

// Gives nanoseconds per message as perftest says, or 0.
double ib_write_bw(const RawPair& raw, std::uint64_t nbytes, std::uint64_t count) {
  if (std::system("command -v ib_write_bw >/dev/null 2>&1") != 0) return 0;
  const std::string call = "timeout 60 ib_write_bw -F -d " + raw.info().name + " -x " +
                           std::to_string(raw.gid_index()) + " -s " + std::to_string(nbytes) +
                           " -n " + std::to_string(count) + " -t " +
                           std::to_string(RawPair::kDepth) + " -l " +
                           std::to_string(RawPair::kBatch) + " -Q " +
                           std::to_string(RawPair::kBatch);
  // The last number but one of the line that begins with the size.
  const std::string both = call + " >/dev/null 2>&1 & sleep 2; " + call +
                           " 127.0.0.1 2>/dev/null | awk '$1 == " + std::to_string(nbytes) +
                           " {print $4}'; wait";
  std::FILE* const out = popen(both.c_str(), "re");
  double mib_per_s = 0;
  if (out == nullptr) return 0;
  if (std::fscanf(out, "%lf", &mib_per_s) != 1) mib_per_s = 0;
  pclose(out);
  return mib_per_s > 0 ? static_cast<double>(nbytes) * 1e9 / (mib_per_s * 0x1p20) : 0;
}

Row row_of(const char* bench, std::string what, std::uint64_t nbytes, std::uint64_t runs,
           const Medians& medians, double operations, Goal goal) {
  Row row{bench,
          std::move(what),
          nbytes,
          runs,
          medians.samples,
          medians.p50[0] / operations,
          medians.p90[0] / operations,
          medians.p50[1] / operations};
  row.transport = "rdma";
  row.goal = goal;
  return row;
}

void put_bw(const Options& options, Rig& rig, Report& report) {
  Moves moves(rig.here());
  for (const auto& [nbytes, count] : {std::pair<std::uint64_t, std::uint64_t>{4u << 10, 256},
                                      {64u << 10, 64},
                                      {1u << 20, 8}}) {
    rig.refill();
    const auto slots = moves.slots_of(nbytes);
    const auto raw = Moves::writes_of(nbytes, slots.size(), count, kHalfBytes);
    const Medians medians =
        measure(options.seconds_per_row,
                {{[&] { moves.put_each(slots, count); }},
                 {[&] { rig.here().raw->write(raw); }},
                 {[&] { rig.here().raw->write(raw, 1); }}},
                1);
    const std::uint64_t different = std::min<std::uint64_t>(count, slots.size());
    rig.verify(Moves::writes_of(nbytes, slots.size(), different, 0));
    const Row row = row_of("put_bw", size_text(nbytes), nbytes, 1, medians,
                           static_cast<double>(count), kBandwidthGoal);
    report.add(row);
    // Each post a doorbell and each WRITE a completion, as with puts that come one by one.
    Row singly = row;
    singly.what += ", singly";
    singly.floor_ns = medians.p50[2] / static_cast<double>(count);
    singly.goal = {};
    report.add(singly);
    // How good the floor is: the well-known program beside it.
    if (const double ns = ib_write_bw(*rig.here().raw, nbytes, 4 * count); ns > 0) {
      Row theirs{"ib_write_bw", size_text(nbytes), nbytes, 1, 1, ns, ns, row.floor_ns};
      theirs.transport = "rdma";
      report.add(theirs);
    }
  }
}

void put_lat(const Options& options, Rig& rig, Report& report) {
  constexpr std::uint64_t kCount = 20;
  Moves moves(rig.here());
  rig.refill();
  const auto slots = moves.slots_of(8);
  const RawPair::Piece raw{0, kHalfBytes, 8};
  const auto put = [&] {
    const TransferItem item{&slots[0].first, &slots[0].second};
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const Transfer transfer = take(rig.here().engine->try_put({&item, 1}, {}));
      (void)transfer.wait(INT64_MAX);
    }
  };
  const auto floor = [&] {
    for (std::uint64_t i = 0; i < kCount; ++i) rig.here().raw->write({&raw, 1});
  };
  const Medians medians = measure(options.seconds_per_row, {{put}, {floor}}, 1);
  rig.verify({{0, 0, 8}});
  report.add(row_of("put_lat", "8 B", 8, 1, medians, kCount, kLatencyGoal));
}

void notify_lat(const Options& options, Rig& rig, Report& report) {
  constexpr std::uint64_t kCount = 20;
  rig.refill();
  Side& side = rig.here();
  const auto kvzc = [&] { side.kvzc_ping(), side.kvzc_await(); };
  const auto raw = [&] { side.raw_ping(), side.raw_await(); };
  const auto times = [](auto once) {
    return [once] {
      for (std::uint64_t i = 0; i < kCount; ++i) once();
    };
  };
  // One more before the clock starts: the other process is at it then.
  const Medians medians =
      measure(options.seconds_per_row,
              {{times(kvzc), [&] { rig.echo_kvzc(kCount + 1), kvzc(); }},
               {times(raw), [&] { rig.echo_raw(kCount + 1), raw(); }}},
              1);
  rig.verify({{0, 0, 8}});
  report.add(row_of("notify_lat", "8 B + tag", 8, 1, medians, 2 * kCount, kLatencyGoal));
}

void put_scatter(const Options& options, Rig& rig, Report& report) {
  constexpr std::int64_t kCount = 1024, kBlockBytes = 4 << 10;
  Moves moves(rig.here());
  rig.refill();
  const Blocks blocks = Moves::pick_blocks(kCount, kBlockBytes);
  std::uint64_t runs = 0;
  const auto put = [&] {
    const Transfer transfer = moves.put_blocks(blocks, kBlockBytes);
    (void)transfer.wait(INT64_MAX);
    runs = transfer.run_count();
  };
  const auto floor = [&] { rig.here().raw->write(blocks.raw_pieces); };
  const Medians medians = measure(options.seconds_per_row, {{put}, {floor}}, 1);
  rig.verify(blocks.pieces);
  report.add(row_of("put_scatter", "1024 x 4 KiB", kCount * kBlockBytes, runs, medians, 1,
                    kScatterGoal));
}

// --- What is asked of the device ---

void count(const Options& options, const char* what, std::uint64_t operations,
           const std::function<void()>& run) {
  run();  // Warm.
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  VerbsCounts counts;
  const std::int64_t start = clock_ns();
  {
    const VerbsWatch watch;
    run();
    counts = watch.counts();
  }
  const std::int64_t took_ns = clock_ns() - start;
  getrusage(RUSAGE_SELF, &after);
  const double n = static_cast<double>(operations);
  const auto per = [n](auto value) { return static_cast<double>(value) / n; };
  const auto cpu_ns = [](const rusage& at) {
    return (at.ru_utime.tv_sec + at.ru_stime.tv_sec) * 1'000'000'000 +
           (at.ru_utime.tv_usec + at.ru_stime.tv_usec) * 1'000;
  };
  const double processor_ns = per(cpu_ns(after) - cpu_ns(before));
  const double sleeps = per(after.ru_nvcsw - before.ru_nvcsw);
  std::fprintf(stderr, "%-26s %10.1f %10.1f %10.1f %8.2f %8.2f %9.2f %9.1f %8.2f %6.2f %6.2f\n",
               what, per(took_ns) / 1e3, processor_ns / 1e3, per(counts.post_ns) / 1e3,
               per(counts.posts), per(counts.requests), per(counts.signalled), per(counts.polls),
               per(counts.completions), per(counts.arms), sleeps);
  if (!options.is_json) return;
  std::printf("{\"bench\": \"counts\", \"what\": \"%s\", \"transport\": \"rdma\", "
              "\"operations\": %" PRIu64 ", \"took_ns\": %.1f, \"cpu_ns\": %.1f, "
              "\"post_ns\": %.1f, \"posts\": %.3f, \"requests\": %.3f, \"signalled\": %.3f, "
              "\"polls\": %.1f, \"completions\": %.3f, \"arms\": %.3f, \"sleeps\": %.3f}\n",
              what, operations, per(took_ns), processor_ns, per(counts.post_ns), per(counts.posts),
              per(counts.requests), per(counts.signalled), per(counts.polls),
              per(counts.completions), per(counts.arms), sleeps);
}

void counts(const Options& options, Rig& rig) {
  Moves moves(rig.here());
  Side& side = rig.here();
  rig.refill();
  std::fprintf(stderr,
               "\nper operation, this process\n"
               "%-26s %10s %10s %10s %8s %8s %9s %9s %8s %6s %6s\n",
               "", "us", "cpu us", "in post us", "posts", "requests", "signalled", "polls",
               "complete", "arms", "sleeps");
  constexpr std::uint64_t kMany = 512, kSome = 100;
  const auto slots = moves.slots_of(4 << 10);
  const auto writes = Moves::writes_of(4 << 10, slots.size(), kMany, kHalfBytes);
  count(options, "put_bw 4 KiB", kMany, [&] { moves.put_each(slots, kMany); });
  count(options, "put_bw 4 KiB, floor", kMany, [&] { side.raw->write(writes); });
  count(options, "  the same, one by one", kMany, [&] { side.raw->write(writes, 1); });
  const auto big = moves.slots_of(1 << 20);
  const auto big_writes = Moves::writes_of(1 << 20, big.size(), 16, kHalfBytes);
  count(options, "put_bw 1 MiB", 16, [&] { moves.put_each(big, 16); });
  count(options, "put_bw 1 MiB, floor", 16, [&] { side.raw->write(big_writes); });
  rig.verify(Moves::writes_of(1 << 20, big.size(), big.size(), 0));
  count(options, "  the same, one by one", 16, [&] { side.raw->write(big_writes, 1); });
  const auto one = moves.slots_of(8);
  count(options, "put_lat 8 B", kSome, [&] {
    for (std::uint64_t i = 0; i < kSome; ++i) {
      const TransferItem item{&one[0].first, &one[0].second};
      (void)take(side.engine->try_put({&item, 1}, {})).wait(INT64_MAX);
    }
  });
  const RawPair::Piece piece{0, kHalfBytes, 8};
  count(options, "put_lat 8 B, floor", kSome, [&] {
    for (std::uint64_t i = 0; i < kSome; ++i) side.raw->write({&piece, 1});
  });
  rig.echo_kvzc(2 * kSome);
  count(options, "notify_lat, both ways", kSome, [&] {
    for (std::uint64_t i = 0; i < kSome; ++i) side.kvzc_ping(), side.kvzc_await();
  });
  rig.echo_raw(2 * kSome);
  count(options, "notify_lat, floor", kSome, [&] {
    for (std::uint64_t i = 0; i < kSome; ++i) side.raw_ping(), side.raw_await();
  });
  const Blocks blocks = Moves::pick_blocks(1024, 4 << 10);
  count(options, "put_scatter 1024 x 4 KiB", 1,
        [&] { (void)moves.put_blocks(blocks, 4 << 10).wait(INT64_MAX); });
  count(options, "put_scatter, floor", 1, [&] { side.raw->write(blocks.raw_pieces); });
}

// --- What kvzc costs by itself ---

// In a process of its own, as it has no other device: one that moves nothing.
void own_cost(const Options& options, Report& report) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child != 0) {
    waitpid(child, nullptr, 0);
    return;
  }
  use_null_device();
  Side here(kNullDevice, kHalfBytes), there(kNullDevice, kHalfBytes);
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) die("socketpair");
  std::thread meeting([&] { there.meet(pair[1]); });
  here.meet(pair[0]);
  meeting.join();
  Moves moves(here);
  const auto slots = moves.slots_of(8);
  const RawPair::Piece raw{0, kHalfBytes, 8};
  const auto put = [&] {
    const TransferItem item{&slots[0].first, &slots[0].second};
    (void)take(here.engine->try_put({&item, 1}, {})).wait(INT64_MAX);
  };
  const Medians single =
      measure(options.seconds_per_row, {{put}, {[&] { here.raw->write({&raw, 1}); }}}, 1000);
  report.add(row_of("own_cost", "8 B", 8, 1, single, 1, {}));
  for (const std::int64_t count : {192, 1024}) {
    const Blocks blocks = Moves::pick_blocks(count, 4 << 10);
    const Medians many =
        measure(options.seconds_per_row,
                {{[&] { (void)moves.put_blocks(blocks, 4 << 10).wait(INT64_MAX); }},
                 {[&] { here.raw->write(blocks.raw_pieces); }}},
                10);
    report.add(row_of("own_cost", "one of " + std::to_string(count) + " blocks", 4 << 10, 1, many,
                      static_cast<double>(count), {}));
  }
  std::fflush(nullptr);
  _exit(0);
}

}  // namespace
}  // namespace kvzc::bench

int main(int argc, char** argv) {
  using namespace kvzc::bench;
  static constexpr const char* kNames[] = {"put_bw",      "put_lat", "notify_lat",
                                           "put_scatter", "counts",  "own_cost"};
  Options options;
  std::string device = "rxe0";
  std::set<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool has_value = i + 1 < argc;
    if (word == "--json") {
      options.is_json = true;
    } else if (word == "--seconds" && has_value) {
      options.seconds_per_row = std::atof(argv[++i]);
    } else if (word == "--device" && has_value) {
      device = argv[++i];
    } else if (std::find(std::begin(kNames), std::end(kNames), word) != std::end(kNames)) {
      wanted.insert(word);
    } else {
      std::fprintf(stderr,
                   "usage: kvzc_bench_rdma [put_bw] [put_lat] [notify_lat] [put_scatter] [counts] "
                   "[own_cost] [--device NAME] [--seconds S] [--json]\n");
      return 2;
    }
  }
  const auto is_wanted = [&](const char* name) { return wanted.empty() || wanted.contains(name); };
  Report report(options);
  if (is_wanted("own_cost")) own_cost(options, report);
  if (wanted == std::set<std::string>{"own_cost"}) return 0;
  Rig rig(device, kHalfBytes);
  if (is_wanted("put_bw")) put_bw(options, rig, report);
  if (is_wanted("put_lat")) put_lat(options, rig, report);
  if (is_wanted("notify_lat")) notify_lat(options, rig, report);
  if (is_wanted("put_scatter")) put_scatter(options, rig, report);
  if (is_wanted("counts")) counts(options, rig);
  return 0;
}

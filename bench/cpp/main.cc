// kvzc_bench [NAME...] [--seconds S] [--most-bytes N] [--json]
//
//   put_lat        one small put and its wait, one small get
//   put_bw         one contiguous put and its wait, by size
//   put_scatter    many blocks, random to random, in one put
//   notify_lat     a put with a tag until the other process has seen it, looking or asleep
//   register_cost  registering, granting, revoking; a put where much is registered
//   private_bw     put_bw into memory that is not mapped
//   first_put      the first put after connect()
//   idle           processor time while nothing happens
//
// Without a name all of them. Each row stands beside its floors, measured in turns with it in the
// same run; payloads are random and checked outside the timed window. The table goes to stderr,
// JSON lines (--json) to stdout.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <set>

#include "base/memory_limit.h"
#include "cpp/harness.h"

namespace kvzc::bench {
namespace {

struct Bench {
  const char* name;
  void (*run)(const Options&, Report&);
};
constexpr Bench kBenches[] = {{"put_lat", put_lat},
                              {"put_bw", put_bw},
                              {"put_scatter", put_scatter},
                              {"notify_lat", notify_lat},
                              {"register_cost", register_cost},
                              {"private_bw", private_bw},
                              {"first_put", first_put},
                              {"idle", idle}};

// A gibibyte, where there is room for it here, at the owner, at the floor's target and where the
// owner makes what it compares with.
std::uint64_t default_most_bytes() {
  constexpr std::uint64_t kLarge = 1u << 30;
  return available_memory().bytes >= 5 * kLarge ? kLarge : kLarge / 4;
}

int usage() {
  std::fprintf(stderr,
               "usage: kvzc_bench [NAME...] [--seconds S] [--most-bytes N] [--json]\nnames:");
  for (const Bench& bench : kBenches) std::fprintf(stderr, " %s", bench.name);
  std::fprintf(stderr, "\n");
  return 2;
}

int run(int argc, char** argv) {
  Options options;
  options.most_bytes = default_most_bytes();
  std::set<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool has_value = i + 1 < argc;
    if (word == "--json") {
      options.is_json = true;
    } else if (word == "--seconds" && has_value) {
      options.seconds_per_row = std::atof(argv[++i]);
    } else if (word == "--most-bytes" && has_value) {
      options.most_bytes = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::any_of(std::begin(kBenches), std::end(kBenches),
                           [&](const Bench& bench) { return word == bench.name; })) {
      wanted.insert(word);
    } else {
      return usage();
    }
  }
  Report report(options);
  for (const Bench& bench : kBenches) {
    if (wanted.empty() || wanted.contains(bench.name)) bench.run(options, report);
  }
  return 0;
}

}  // namespace
}  // namespace kvzc::bench

int main(int argc, char** argv) { return kvzc::bench::run(argc, argv); }

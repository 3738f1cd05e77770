// kvzc_bench [put_bw] [put_scatter] [--seconds S] [--most-bytes N] [--json]
//
//   put_bw       one contiguous put and its wait, by size
//   put_scatter  many blocks, random to random, in one put
//
// Each row stands beside its floors, measured in turns with it in the same run; payloads are random
// and checked by the other process outside the timed window. The table goes to stderr, JSON lines
// (--json) to stdout.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "cpp/harness.h"

int main(int argc, char** argv) {
  kvzc::bench::Options options;
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
    } else if (word == "put_bw" || word == "put_scatter") {
      wanted.insert(word);
    } else {
      std::fprintf(stderr,
                   "usage: kvzc_bench [put_bw] [put_scatter] [--seconds S] [--most-bytes N] "
                   "[--json]\n");
      return 2;
    }
  }
  const auto is_wanted = [&](const char* name) { return wanted.empty() || wanted.contains(name); };
  kvzc::bench::Report report(options);
  if (is_wanted("put_bw")) kvzc::bench::put_bw(options, report);
  if (is_wanted("put_scatter")) kvzc::bench::put_scatter(options, report);
  return 0;
}

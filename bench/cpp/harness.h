// What every benchmark needs: two processes, a clock, medians, floors, a table and JSON lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvzc/engine.h"

namespace kvzc::bench {

struct Options {
  double seconds_per_row = 1.0;
  std::uint64_t most_bytes = 256u << 20;
  bool is_json = false;
};

// One line of the result. Times are medians of single operations.
struct Row {
  std::string bench;
  std::string what;          // Size or shape, for people.
  std::uint64_t nbytes = 0;  // Per operation.
  std::uint64_t runs = 1;
  std::size_t samples = 0;
  double put_ns = 0;  // put + wait.
  double p90_ns = 0;
  double floor_ns = 0;   // The best plain copy with the same threads, same bytes, same run.
  double memcpy_ns = 0;  // One memcpy, or one loop of them, on one thread. 0: not measured.
  const char* transport = "shm";
  double goal = 0;  // Of "of floor"; 0: none.
};

// Collects rows; prints a table to stderr and JSON lines to stdout.
class Report {
 public:
  explicit Report(const Options& options) : options_(options) {}
  void add(const Row& row);

 private:
  const Options& options_;
  bool has_header_ = false;
};

// Ends the program.
[[noreturn]] void die(const std::string& why);
template <typename T>
T take(Result<T> result) {
  if (!result.is_ok()) die(result.status().to_string());
  return result.take();
}

// All bytes, between two processes. The writer dies when the reader is gone; the reader gets false.
void write_all(int fd, const void* data, std::size_t nbytes);
bool read_all(int fd, void* data, std::size_t nbytes);

std::string size_text(std::uint64_t nbytes);

// Fills with bytes that depend on the seed and cannot be compressed or guessed.
void fill_random_bytes(std::byte* data, std::uint64_t nbytes, std::uint64_t seed);

// A second process that owns sharable memory, and the engine of this one that writes into it.
class TwoProcesses {
 public:
  explicit TwoProcesses(std::uint64_t nbytes);
  ~TwoProcesses();
  TwoProcesses(const TwoProcesses&) = delete;
  TwoProcesses& operator=(const TwoProcesses&) = delete;

  Engine& engine() { return *engine_; }
  const RemoteView& target() const { return target_; }
  // Compares the owner's memory, seen from there, with what it should be: pieces of (offset there,
  // offset in the source, length) of a source filled with `seed`. Ends the program when it differs.
  struct Piece {
    std::uint64_t target, source, nbytes;
  };
  void verify(std::uint64_t seed, std::uint64_t source_nbytes, const std::vector<Piece>& pieces);

 private:
  int socket_ = -1;
  int child_ = -1;
  std::shared_ptr<Engine> engine_;
  RemoteView target_;
};

// Copies runs with a fixed number of threads, this one included: the floor. Awake, they spin and
// cost no wake-up; at rest they leave the cores to what is measured in turns with them.
class FloorCopier {
 public:
  explicit FloorCopier(std::uint32_t threads);
  ~FloorCopier();
  void wake();
  void rest();
  struct Copy {
    std::byte* target;
    const std::byte* source;
    std::uint64_t nbytes;
  };
  // Says what copy() does, outside the timed window: shares of about `share_bytes`.
  void prepare(const std::vector<Copy>& copies, bool streaming, std::uint64_t share_bytes);
  // Returns when all are copied and visible. Requires: awake.
  void copy();

 private:
  struct State;
  State* state_;
};

// Measures alternately, so that a noisy neighbour hits both: medians of each in nanoseconds.
struct Medians {
  std::vector<double> p50, p90;
  std::size_t samples = 0;
};
struct Operation {
  std::function<void()> run;
  std::function<void()> before = [] {};  // These two outside the timed window.
  std::function<void()> after = [] {};
};
Medians measure(double seconds, const std::vector<Operation>& operations,
                std::uint32_t repeats_per_sample);

std::int64_t clock_ns();

void put_bw(const Options& options, Report& report);
void put_scatter(const Options& options, Report& report);

}  // namespace kvzc::bench

// What every benchmark needs: two processes, a clock, medians, floors, a table and JSON lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvzc/engine.h"

namespace kvzc::bench {

struct Options {
  double seconds_per_row = 1.0;
  std::uint64_t most_bytes = 256u << 20;
  bool is_json = false;
};

// --- Medians ---

// Measures alternately, so that a noisy neighbour hits all: medians of each in nanoseconds.
struct Medians {
  std::vector<double> p50, p90;
  std::size_t samples = 0;
};
// Gives one sample in nanoseconds.
using Sampler = std::function<double()>;
Medians take_turns(double seconds, const std::vector<Sampler>& samplers);

struct Operation {
  std::function<void()> run;
  std::function<void()> before = [] {};  // These two outside the timed window.
  std::function<void()> after = [] {};
};
// Gives the time of one of so many runs, measured together.
Sampler timed(Operation operation, std::uint32_t repeats = 1);
// The same for several.
Medians measure(double seconds, const std::vector<Operation>& operations,
                std::uint32_t repeats_per_sample);

std::int64_t clock_ns();

// --- The result ---

// What a row should reach.
struct Goal {
  enum class Kind { kNone, kOfFloor, kTimesFloor, kWithinNs };
  Kind kind = Kind::kNone;
  double value = 0;
};
// "of floor" is at least this.
constexpr Goal of_floor(double least) { return {Goal::Kind::kOfFloor, least}; }
// The time is at most so many times that of the floor.
constexpr Goal times_floor(double most) { return {Goal::Kind::kTimesFloor, most}; }
// The time is at most this.
constexpr Goal within_ns(double most) { return {Goal::Kind::kWithinNs, most}; }

// One line of the result. Times are medians of single operations.
struct Row {
  std::string bench;
  std::string what;          // Size or shape, for people.
  std::uint64_t nbytes = 0;  // Per operation; 0: it moves none.
  std::uint64_t runs = 1;
  std::size_t samples = 0;
  double kvzc_ns = 0;
  double p90_ns = 0;
  double floor_ns = 0;   // The best plain way to the same, in the same run. 0: there is none.
  double memcpy_ns = 0;  // One memcpy, or one loop of them, on one thread. 0: not measured.
  const char* transport = "shm";
  Goal goal = {};
};

// Collects rows; prints a table to stderr and JSON lines to stdout.
class Report {
 public:
  explicit Report(const Options& options) : options_(options) {}
  void add(const Row& row);
  // Of medians in the order kvzc, floor, memcpy; the last two may be missing.
  void add(const char* bench, std::string what, std::uint64_t nbytes, const Medians& medians,
           Goal goal = {}, std::uint64_t runs = 1);

 private:
  const Options& options_;
  bool has_header_ = false;
};

// --- Two processes ---

// Ends the program.
[[noreturn]] void die(const std::string& why);
template <typename T>
T take(Result<T> result) {
  if (!result.is_ok()) die(result.status().to_string());
  return result.take();
}
void check(const Status& status);

// All bytes, between two processes. The writer dies when the reader is gone; the reader gets false.
void write_all(int fd, const void* data, std::size_t nbytes);
bool read_all(int fd, void* data, std::size_t nbytes);
// The same for texts and for plain values; the reader dies too.
void write_text(int fd, const std::string& text);
std::string read_text(int fd);
template <typename T>
void write_value(int fd, const T& value) {
  write_all(fd, &value, sizeof value);
}
template <typename T>
T read_value(int fd) {
  T value;
  if (!read_all(fd, &value, sizeof value)) die("the other process is gone");
  return value;
}

std::string size_text(std::uint64_t nbytes);

// Fills with bytes that depend on the seed and cannot be compressed or guessed.
void fill_random_bytes(std::byte* data, std::uint64_t nbytes, std::uint64_t seed);

// Where the two processes run: wherever the kernel likes, or each on one core of its own, if there
// are two.
enum class Cores { kAny, kOneEach };
bool has_two_cores();

// A second process that lives `life` at the other end of a socket. Made before this process has an
// engine; it should end when its socket does.
class OtherProcess {
 public:
  OtherProcess(Cores cores, const std::function<void(int socket)>& life);
  ~OtherProcess();
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  int socket() const { return socket_; }
  int pid() const { return child_; }

 private:
  class Pin;
  std::unique_ptr<Pin> pin_;
  int socket_ = -1;
  int child_ = -1;
};

enum class MemoryKind {
  kShared,  // As of kvzc.empty: a peer maps it.
  kPrivate  // Ordinary memory: the kernel copies.
};

// Memory for an engine to register, all of it there: no page is touched for the first time later.
class Memory {
 public:
  Memory(Engine& engine, std::uint64_t nbytes, MemoryKind kind = MemoryKind::kShared);
  std::byte* data() const { return data_; }
  // One axis of bytes: all of it, or some, as a storage of its own or part of the whole.
  TensorSpec spec() const { return spec_of(0, nbytes_); }
  TensorSpec spec_of(std::uint64_t offset, std::uint64_t nbytes) const;

 private:
  std::byte* data_;
  std::uint64_t nbytes_;
  KeepAlive keep_alive_;
};

Region register_one(Engine& engine, const TensorSpec& spec);
std::string text_of(const HandleInfo& handle);
// Connects, too.
RemoteView open_handle(Engine& engine, const std::string& text);
// Bytes of a view with one axis of them.
template <typename AnyView>
AnyView bytes_of(const AnyView& view, std::uint64_t offset, std::uint64_t nbytes) {
  const auto begin = static_cast<std::int64_t>(offset);
  const Index index = Slice{begin, begin + static_cast<std::int64_t>(nbytes), std::nullopt};
  return take(view.index({&index, 1}));
}
void put_and_wait(Engine& engine, const LocalView& source, const RemoteView& target,
                  const TransferOptions& options = {});

// A second process that owns memory, and the engine of this one that writes into it.
class TwoProcesses {
 public:
  explicit TwoProcesses(std::uint64_t nbytes, MemoryKind kind = MemoryKind::kShared,
                        Cores cores = Cores::kAny);
  TwoProcesses(const TwoProcesses&) = delete;
  TwoProcesses& operator=(const TwoProcesses&) = delete;

  Engine& engine() { return *engine_; }
  const RemoteView& target() const { return target_; }
  int owner_pid() const { return other_.pid(); }
  // Where the memory lies in the owner.
  std::uint64_t owner_address() const { return owner_address_; }
  // Has the owner take other memory instead, which nobody has written to, and connects to that.
  void renew();
  // Compares the owner's memory, seen from there, with what it should be: pieces of (offset there,
  // offset in the source, length) of a source filled with `seed`. Ends the program when it differs.
  struct Piece {
    std::uint64_t target, source, nbytes;
  };
  void verify(std::uint64_t seed, std::uint64_t source_nbytes, const std::vector<Piece>& pieces);

 private:
  void meet();

  OtherProcess other_;
  std::shared_ptr<Engine> engine_;
  RemoteView target_;
  std::uint64_t owner_address_ = 0;
};

// --- The floor ---

// Copies runs with a fixed number of threads, this one included: the floor. Awake, they spin and
// cost no wake-up; at rest they leave the cores to what is measured in turns with them.
class FloorCopier {
 public:
  struct Copy {
    std::byte* target;
    const std::byte* source;
    std::uint64_t nbytes;
  };
  // Without `by` it copies with kvzc's own kernel, within this process.
  explicit FloorCopier(std::uint32_t threads, std::function<void(const Copy&)> by = nullptr);
  ~FloorCopier();
  // Says what copy() does, outside the timed window: shares of about `share_bytes`.
  void prepare(const std::vector<Copy>& copies, bool streaming, std::uint64_t share_bytes);
  // Returns when all are copied and visible. Requires: awake.
  void copy();
  // The same, awake while it is measured.
  Operation operation();

 private:
  struct State;
  void wake();
  void rest();
  State* state_;
};

// --- The benchmarks ---

void put_lat(const Options& options, Report& report);
void put_bw(const Options& options, Report& report);
void put_scatter(const Options& options, Report& report);
void notify_lat(const Options& options, Report& report);
void register_cost(const Options& options, Report& report);
void private_bw(const Options& options, Report& report);
void first_put(const Options& options, Report& report);
void idle(const Options& options, Report& report);

}  // namespace kvzc::bench

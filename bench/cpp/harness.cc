#include "cpp/harness.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/copy.h"
#include "base/futex.h"

namespace kvzc::bench {

void die(const std::string& why) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, why.c_str());
  std::exit(1);
}

void check(const Status& status) {
  if (!status.is_ok()) die(status.to_string());
}

void write_all(int fd, const void* data, std::size_t nbytes) {
  for (const char* at = static_cast<const char*>(data); nbytes > 0;) {
    const ssize_t sent = write(fd, at, nbytes);
    if (sent <= 0) die("the other process is gone");
    at += sent;
    nbytes -= static_cast<std::size_t>(sent);
  }
}

bool read_all(int fd, void* data, std::size_t nbytes) {
  for (char* at = static_cast<char*>(data); nbytes > 0;) {
    const ssize_t got = read(fd, at, nbytes);
    if (got <= 0) return false;
    at += got;
    nbytes -= static_cast<std::size_t>(got);
  }
  return true;
}

void write_text(int fd, const std::string& text) {
  write_value(fd, text.size());
  write_all(fd, text.data(), text.size());
}

std::string read_text(int fd) {
  std::string text(read_value<std::size_t>(fd), '\0');
  if (!read_all(fd, text.data(), text.size())) die("the other process is gone");
  return text;
}

std::string size_text(std::uint64_t nbytes) {
  if (nbytes >= 1u << 20) return std::to_string(nbytes >> 20) + " MiB";
  if (nbytes >= 1u << 10) return std::to_string(nbytes >> 10) + " KiB";
  return std::to_string(nbytes) + " B";
}

std::int64_t clock_ns() { return now_ns(); }

void fill_random_bytes(std::byte* data, std::uint64_t nbytes, std::uint64_t seed) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
  for (std::uint64_t i = 0; i < nbytes; i += 8) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    std::memcpy(data + i, &x, std::min<std::uint64_t>(8, nbytes - i));
  }
}

// --- Two processes ---

// Keeps this thread, and those that it makes, on one core.
class OtherProcess::Pin {
 public:
  explicit Pin(int nth) {
    sched_getaffinity(0, sizeof before_, &before_);
    int core = 0;
    for (; !CPU_ISSET(core, &before_) || nth-- > 0; ++core) {
    }
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    sched_setaffinity(0, sizeof only, &only);
  }
  ~Pin() { sched_setaffinity(0, sizeof before_, &before_); }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  cpu_set_t before_;
};

bool has_two_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) >= 2;
}

OtherProcess::OtherProcess(Cores cores, const std::function<void(int socket)>& life) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) die("socketpair");
  const bool is_pinned = cores == Cores::kOneEach && has_two_cores();
  std::fflush(nullptr);
  child_ = fork();
  if (child_ == 0) {
    close(pair[0]);
    if (is_pinned) pin_ = std::make_unique<Pin>(1);
    life(pair[1]);
    std::exit(0);
  }
  if (is_pinned) pin_ = std::make_unique<Pin>(0);
  close(pair[1]);
  socket_ = pair[0];
}

OtherProcess::~OtherProcess() {
  close(socket_);
  waitpid(child_, nullptr, 0);
}

Memory::Memory(Engine& engine, std::uint64_t nbytes, MemoryKind kind) : nbytes_(nbytes) {
  if (kind == MemoryKind::kShared) {
    const auto allocation = take(engine.allocator().allocate(nbytes));
    data_ = allocation->data();
    keep_alive_ = allocation;
    return;
  }
  // A mapping of its own: nothing else lies in its pages.
  void* const mapping = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (mapping == MAP_FAILED) die("no memory");
  data_ = static_cast<std::byte*>(mapping);
  keep_alive_ = KeepAlive(mapping, [nbytes](void* at) { munmap(at, nbytes); });
}

TensorSpec Memory::spec_of(std::uint64_t offset, std::uint64_t nbytes) const {
  TensorSpec spec;
  spec.shape = {static_cast<std::int64_t>(nbytes)};
  spec.strides_bytes = {1};
  spec.data = spec.storage_data = data_ + offset;
  spec.storage_nbytes = nbytes;
  spec.keep_alive = keep_alive_;
  return spec;
}

Region register_one(Engine& engine, const TensorSpec& spec) {
  return take(engine.register_memory({&spec, 1}));
}

std::string text_of(const HandleInfo& handle) {
  return handle_to_text(take(encode_handle(handle)));
}

RemoteView open_handle(Engine& engine, const std::string& text) {
  RemoteView view = take(RemoteView::from_text(text));
  const Transfer connected = take(engine.connect(view));
  check(connected.wait(now_ns() + 10'000'000'000));
  check(connected.status());
  return view;
}

void put_and_wait(Engine& engine, const LocalView& source, const RemoteView& target,
                  const TransferOptions& options) {
  const TransferItem item{&source, &target};
  const Transfer transfer = engine.try_put({&item, 1}, options).take();
  (void)transfer.wait(INT64_MAX);
}

namespace {

enum class Ask : std::uint64_t { kVerify, kRenew };

struct Request {
  Ask ask;
  std::uint64_t seed, source_nbytes, piece_count;
};

// The owner: shares its memory, then checks or renews it as often as it is asked to.
void own(int socket, std::uint64_t nbytes, MemoryKind kind) {
  const std::shared_ptr<Engine> engine = take(Engine::create({}));
  std::optional<Memory> memory;
  Region region;
  const auto share = [&] {
    memory.emplace(*engine, nbytes, kind);
    region = register_one(*engine, memory->spec());
    write_text(socket, text_of(take(region.handle())));
    write_value(socket, memory->data());
  };
  share();
  for (Request request; read_all(socket, &request, sizeof request);) {
    if (request.ask == Ask::kRenew) {
      check(region.close(INT64_MAX));
      memory.reset();
      share();
      continue;
    }
    std::vector<TwoProcesses::Piece> pieces(request.piece_count);
    if (!read_all(socket, pieces.data(), pieces.size() * sizeof(TwoProcesses::Piece))) break;
    std::vector<std::byte> source(request.source_nbytes);
    fill_random_bytes(source.data(), source.size(), request.seed);
    const bool is_right = std::all_of(pieces.begin(), pieces.end(), [&](const auto& piece) {
      return std::memcmp(memory->data() + piece.target, source.data() + piece.source,
                         piece.nbytes) == 0;
    });
    write_value(socket, is_right);
  }
}

}  // namespace

TwoProcesses::TwoProcesses(std::uint64_t nbytes, MemoryKind kind, Cores cores)
    : other_(cores, [=](int socket) { own(socket, nbytes, kind); }),
      engine_(take(Engine::create({}))) {
  meet();
}

void TwoProcesses::meet() {
  const std::string text = read_text(other_.socket());
  owner_address_ = read_value<std::uint64_t>(other_.socket());
  target_ = open_handle(*engine_, text);
}

void TwoProcesses::renew() {
  target_ = RemoteView();
  write_value(other_.socket(), Request{Ask::kRenew, 0, 0, 0});
  meet();
}

void TwoProcesses::verify(std::uint64_t seed, std::uint64_t source_nbytes,
                          const std::vector<Piece>& pieces) {
  write_value(other_.socket(), Request{Ask::kVerify, seed, source_nbytes, pieces.size()});
  write_all(other_.socket(), pieces.data(), pieces.size() * sizeof(Piece));
  if (!read_value<bool>(other_.socket())) die("the owner's bytes are not those that were put");
}

// --- The floor ---

struct FloorCopier::State {
  std::vector<std::thread> threads;
  std::vector<std::vector<Copy>> shares;
  std::function<void(const Copy&)> by;
  bool streaming = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> is_awake{false};  // Set under the mutex.
  std::atomic<bool> is_over{false};
  alignas(64) std::atomic<std::uint64_t> generation{0};
  alignas(64) std::atomic<std::uint64_t> next{0};
  alignas(64) std::atomic<std::uint64_t> done{0};  // Shares of this round that are visible.
  std::atomic<std::uint64_t> spinning{0};

  void work() {
    for (;;) {
      const std::uint64_t at = next.fetch_add(1, std::memory_order_acq_rel);
      if (at >= shares.size()) break;
      for (const Copy& each : shares[at]) {
        if (by) {
          by(each);
        } else {
          copy_bytes(each.target, each.source, each.nbytes, streaming);
        }
      }
      if (streaming) copy_fence();
      done.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  void help() {
    std::uint64_t seen = 0;
    while (!is_over.load()) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return is_awake.load() || is_over.load(); });
      }
      spinning.fetch_add(1);
      while (is_awake.load(std::memory_order_relaxed) && !is_over.load(std::memory_order_relaxed)) {
        const std::uint64_t now = generation.load(std::memory_order_acquire);
        if (now == seen) {
          cpu_relax();
          continue;
        }
        seen = now;
        work();
      }
      spinning.fetch_sub(1);
    }
  }
};

FloorCopier::FloorCopier(std::uint32_t threads, std::function<void(const Copy&)> by)
    : state_(new State) {
  state_->by = std::move(by);
  for (std::uint32_t i = 1; i < threads; ++i) {
    state_->threads.emplace_back([state = state_] { state->help(); });
  }
}

FloorCopier::~FloorCopier() {
  {
    std::lock_guard lock(state_->mutex);
    state_->is_over.store(true);
  }
  state_->changed.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

void FloorCopier::wake() {
  {
    std::lock_guard lock(state_->mutex);
    state_->is_awake.store(true);
  }
  state_->changed.notify_all();
  while (state_->spinning.load() != state_->threads.size()) cpu_relax();
}

void FloorCopier::rest() {
  {
    std::lock_guard lock(state_->mutex);
    state_->is_awake.store(false);
  }
  while (state_->spinning.load() != 0) cpu_relax();
}

void FloorCopier::prepare(const std::vector<Copy>& copies, bool streaming,
                          std::uint64_t share_bytes) {
  state_->shares.clear();
  state_->streaming = streaming;
  std::uint64_t room = 0;
  for (const Copy& whole : copies) {
    for (std::uint64_t at = 0; at < whole.nbytes;) {
      if (room == 0) {
        state_->shares.emplace_back();
        room = share_bytes;
      }
      const std::uint64_t take = std::min(room, whole.nbytes - at);
      state_->shares.back().push_back({whole.target + at, whole.source + at, take});
      at += take;
      room -= take;
    }
  }
  // None is to be had before copy() says so.
  state_->next.store(state_->shares.size());
}

void FloorCopier::copy() {
  State& state = *state_;
  // In this order: a helper that comes late from the round before may begin with this one.
  state.done.store(0, std::memory_order_relaxed);
  state.next.store(0, std::memory_order_release);
  state.generation.fetch_add(1, std::memory_order_release);
  state.work();
  // Not for a helper that has no share: it may have lost its core to somebody else.
  while (state.done.load(std::memory_order_acquire) != state.shares.size()) cpu_relax();
}

Operation FloorCopier::operation() {
  return {[this] { copy(); }, [this] { wake(); }, [this] { rest(); }};
}

// --- Measuring and reporting ---

Medians take_turns(double seconds, const std::vector<Sampler>& samplers) {
  std::vector<std::vector<double>> samples(samplers.size());
  for (const Sampler& sampler : samplers) (void)sampler();  // Warm.
  const std::int64_t end = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  while (samples[0].size() < 5 || (now_ns() < end && samples[0].size() < 20'000)) {
    for (std::size_t i = 0; i < samplers.size(); ++i) samples[i].push_back(samplers[i]());
  }
  Medians out;
  out.samples = samples[0].size();
  for (auto& each : samples) {
    std::sort(each.begin(), each.end());
    out.p50.push_back(each[each.size() / 2]);
    out.p90.push_back(each[each.size() * 9 / 10]);
  }
  return out;
}

Sampler timed(Operation operation, std::uint32_t repeats) {
  return [operation = std::move(operation), repeats] {
    operation.before();
    const std::int64_t start = now_ns();
    for (std::uint32_t repeat = 0; repeat < repeats; ++repeat) operation.run();
    const std::int64_t took = now_ns() - start;
    operation.after();
    return static_cast<double>(took) / repeats;
  };
}

Medians measure(double seconds, const std::vector<Operation>& operations,
                std::uint32_t repeats_per_sample) {
  std::vector<Sampler> samplers;
  for (const Operation& operation : operations) {
    samplers.push_back(timed(operation, repeats_per_sample));
  }
  return take_turns(seconds, samplers);
}

namespace {

// Gives a number with so many digits behind the point, or "-" for none.
std::string or_none(double value, int digits) {
  char text[32] = "-";
  if (value > 0) std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

double ratio(double floor_ns, double kvzc_ns) { return kvzc_ns > 0 ? floor_ns / kvzc_ns : 0; }

struct Verdict {
  std::string wanted;  // For people.
  const char* kind;    // For tools.
  bool is_met;
};
Verdict judge(const Row& row) {
  const double value = row.goal.value;
  switch (row.goal.kind) {
    case Goal::Kind::kOfFloor:
      return {">= " + or_none(value, 2), "of_floor", ratio(row.floor_ns, row.kvzc_ns) >= value};
    case Goal::Kind::kTimesFloor:
      return {"<= " + or_none(value, 2) + " x", "times_floor", row.kvzc_ns <= value * row.floor_ns};
    case Goal::Kind::kWithinNs:
      return {"<= " + or_none(value / 1e3, value < 1e3 ? 2 : 0) + " us", "within_ns",
              row.kvzc_ns <= value};
    case Goal::Kind::kNone:
      break;
  }
  return {"-", "", false};
}

}  // namespace

void Report::add(const char* bench, std::string what, std::uint64_t nbytes, const Medians& medians,
                 Goal goal, std::uint64_t runs) {
  const auto floor = [&](std::size_t i) { return medians.p50.size() > i ? medians.p50[i] : 0; };
  add({bench, std::move(what), nbytes, runs, medians.samples, medians.p50[0], medians.p90[0],
       floor(1), floor(2), "shm", goal});
}

void Report::add(const Row& row) {
  const double gb_per_s = ratio(static_cast<double>(row.nbytes), row.kvzc_ns);
  const double of_floor = ratio(row.floor_ns, row.kvzc_ns);
  const double of_memcpy = ratio(row.memcpy_ns, row.kvzc_ns);
  const bool has_goal = row.goal.kind != Goal::Kind::kNone;
  const Verdict verdict = judge(row);
  if (!has_header_) {
    has_header_ = true;
    std::fprintf(stderr, "%-13s %-30s %6s %12s %12s %12s %7s %9s %9s  %-12s\n", "bench", "what",
                 "runs", "kvzc us", "p90 us", "floor us", "GB/s", "of floor", "of memcpy", "goal");
  }
  std::fprintf(stderr, "%-13s %-30s %6" PRIu64 " %12.3f %12.3f %12s %7s %9s %9s  %-12s %s\n",
               row.bench.c_str(), row.what.c_str(), row.runs, row.kvzc_ns / 1e3, row.p90_ns / 1e3,
               or_none(row.floor_ns / 1e3, 3).c_str(), or_none(gb_per_s, 3).c_str(),
               or_none(of_floor, 2).c_str(), or_none(of_memcpy, 2).c_str(), verdict.wanted.c_str(),
               !has_goal        ? ""
               : verdict.is_met ? "met"
                                : "missed");
  if (!options_.is_json) return;
  std::printf(
      "{\"bench\": \"%s\", \"what\": \"%s\", \"transport\": \"%s\", "
      "\"nbytes\": %" PRIu64 ", \"runs\": %" PRIu64
      ", \"samples\": %zu, \"kvzc_ns\": %.1f, \"p90_ns\": %.1f, ",
      row.bench.c_str(), row.what.c_str(), row.transport, row.nbytes, row.runs, row.samples,
      row.kvzc_ns, row.p90_ns);
  if (row.floor_ns > 0) {
    std::printf("\"floor_ns\": %.1f, \"of_floor\": %.3f, ", row.floor_ns, of_floor);
  }
  if (row.memcpy_ns > 0) {
    std::printf("\"memcpy_ns\": %.1f, \"of_memcpy\": %.3f, \"copy_kernel\": \"%s\", ",
                row.memcpy_ns, of_memcpy, copy_kernel());
  }
  if (has_goal) {
    std::printf("\"goal\": {\"%s\": %.2f}, \"is_met\": %s, ", verdict.kind, row.goal.value,
                verdict.is_met ? "true" : "false");
  }
  std::printf("\"cores\": %u}\n", std::thread::hardware_concurrency());
  std::fflush(stdout);
}

}  // namespace kvzc::bench

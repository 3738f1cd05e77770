#include "cpp/harness.h"

#include <errno.h>
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

#include "base/clock.h"
#include "base/copy.h"
#include "base/futex.h"

namespace kvzc::bench {

void die(const std::string& why) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, why.c_str());
  std::exit(1);
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

std::string size_text(std::uint64_t nbytes) {
  if (nbytes >= 1u << 20) return std::to_string(nbytes >> 20) + " MiB";
  if (nbytes >= 1u << 10) return std::to_string(nbytes >> 10) + " KiB";
  return std::to_string(nbytes) + " B";
}

namespace {

// The owner: shares its memory, then checks it as often as it is asked to.
[[noreturn]] void own(int socket, std::uint64_t nbytes) {
  {
    const std::shared_ptr<Engine> engine = take(Engine::create({}));
    const std::shared_ptr<SharedAllocation> memory = take(engine->allocator().allocate(nbytes));
    TensorSpec spec;
    spec.shape = {static_cast<std::int64_t>(nbytes)};
    spec.strides_bytes = {1};
    spec.data = spec.storage_data = memory->data();
    spec.storage_nbytes = nbytes;
    spec.keep_alive = memory;
    Region region = take(engine->register_memory({&spec, 1}));
    const std::string text = handle_to_text(take(encode_handle(take(region.handle()))));
    const std::uint64_t length = text.size();
    write_all(socket, &length, sizeof length);
    write_all(socket, text.data(), length);
    std::uint64_t request[3];
    while (read_all(socket, request, sizeof request)) {
      const auto [seed, source_nbytes, count] = request;
      std::vector<TwoProcesses::Piece> pieces(count);
      if (!read_all(socket, pieces.data(), count * sizeof(TwoProcesses::Piece))) break;
      std::vector<std::byte> source(source_nbytes);
      fill_random_bytes(source.data(), source_nbytes, seed);
      char is_right = 1;
      for (const auto& piece : pieces) {
        if (std::memcmp(memory->data() + piece.target, source.data() + piece.source,
                        piece.nbytes) != 0) {
          is_right = 0;
        }
      }
      write_all(socket, &is_right, 1);
    }
  }
  std::exit(0);
}

}  // namespace

std::int64_t clock_ns() { return now_ns(); }

void fill_random_bytes(std::byte* data, std::uint64_t nbytes, std::uint64_t seed) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
  for (std::uint64_t i = 0; i < nbytes; i += 8) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    std::memcpy(data + i, &x, std::min<std::uint64_t>(8, nbytes - i));
  }
}

// --- Two processes ---

TwoProcesses::TwoProcesses(std::uint64_t nbytes) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) die("socketpair");
  std::fflush(nullptr);
  child_ = fork();  // Before this process has an engine.
  if (child_ == 0) {
    close(pair[0]);
    own(pair[1], nbytes);
  }
  close(pair[1]);
  socket_ = pair[0];
  std::uint64_t length = 0;
  if (!read_all(socket_, &length, sizeof length)) die("the owner did not start");
  std::string text(length, '\0');
  if (!read_all(socket_, text.data(), length)) die("the owner did not start");
  engine_ = take(Engine::create({}));
  target_ = take(RemoteView::from_text(text));
  const Transfer connected = take(engine_->connect(target_));
  if (!connected.wait(now_ns() + 10'000'000'000).is_ok() || !connected.status().is_ok()) {
    die("cannot connect: " + connected.status().to_string());
  }
}

TwoProcesses::~TwoProcesses() {
  engine_.reset();
  close(socket_);
  waitpid(child_, nullptr, 0);
}

void TwoProcesses::verify(std::uint64_t seed, std::uint64_t source_nbytes,
                          const std::vector<Piece>& pieces) {
  const std::uint64_t request[3] = {seed, source_nbytes, pieces.size()};
  write_all(socket_, request, sizeof request);
  write_all(socket_, pieces.data(), pieces.size() * sizeof(Piece));
  char is_right = 0;
  if (!read_all(socket_, &is_right, 1)) die("the owner is gone");
  if (is_right == 0) die("the owner's bytes are not those that were put");
}

// --- The floor ---

struct FloorCopier::State {
  std::vector<std::thread> threads;
  std::vector<std::vector<Copy>> shares;
  bool streaming = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> is_awake{false};  // Set under the mutex.
  std::atomic<bool> is_over{false};
  alignas(64) std::atomic<std::uint64_t> generation{0};
  alignas(64) std::atomic<std::uint64_t> next{0};
  alignas(64) std::atomic<std::uint64_t> finished{0};  // Helpers that have left this round.
  std::atomic<std::uint64_t> spinning{0};

  void work() {
    for (;;) {
      const std::uint64_t at = next.fetch_add(1, std::memory_order_acq_rel);
      if (at >= shares.size()) break;
      for (const Copy& each : shares[at]) {
        copy_bytes(each.target, each.source, each.nbytes, streaming);
      }
    }
    if (streaming) copy_fence();
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
        finished.fetch_add(1, std::memory_order_acq_rel);
      }
      spinning.fetch_sub(1);
    }
  }
};

FloorCopier::FloorCopier(std::uint32_t threads) : state_(new State) {
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
  std::lock_guard lock(state_->mutex);
  state_->is_awake.store(false);
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
}

void FloorCopier::copy() {
  State& state = *state_;
  state.finished.store(0, std::memory_order_relaxed);
  state.next.store(0, std::memory_order_relaxed);
  state.generation.fetch_add(1, std::memory_order_release);
  state.work();
  while (state.finished.load(std::memory_order_acquire) != state.threads.size()) cpu_relax();
}

// --- Measuring and reporting ---

Medians measure(double seconds, const std::vector<Operation>& operations,
                std::uint32_t repeats_per_sample) {
  std::vector<std::vector<double>> samples(operations.size());
  for (const Operation& operation : operations) {  // Warm.
    operation.before();
    operation.run();
    operation.after();
  }
  const std::int64_t end = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  while (samples[0].size() < 5 || (now_ns() < end && samples[0].size() < 20'000)) {
    for (std::size_t i = 0; i < operations.size(); ++i) {
      operations[i].before();
      const std::int64_t start = now_ns();
      for (std::uint32_t repeat = 0; repeat < repeats_per_sample; ++repeat) operations[i].run();
      samples[i].push_back(static_cast<double>(now_ns() - start) / repeats_per_sample);
      operations[i].after();
    }
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

void Report::add(const Row& row) {
  const double gb_per_s = row.put_ns > 0 ? static_cast<double>(row.nbytes) / row.put_ns : 0;
  const auto ratio = [&](double floor) { return row.put_ns > 0 ? floor / row.put_ns : 0; };
  const auto or_none = [](double value) {
    char text[32] = "-";
    if (value > 0) std::snprintf(text, sizeof text, "%.2f", value);
    return std::string(text);
  };
  if (!has_header_) {
    has_header_ = true;
    std::fprintf(stderr, "%-12s %-18s %8s %12s %12s %8s %9s %9s %6s\n", "bench", "what", "runs",
                 "kvzc us", "p90 us", "GB/s", "of floor", "of memcpy", "goal");
  }
  std::fprintf(stderr, "%-12s %-18s %8" PRIu64 " %12.2f %12.2f %8.3f %9.2f %9s %6s\n",
               row.bench.c_str(), row.what.c_str(), row.runs, row.put_ns / 1e3, row.p90_ns / 1e3,
               gb_per_s, ratio(row.floor_ns), or_none(ratio(row.memcpy_ns)).c_str(),
               or_none(row.goal).c_str());
  if (!options_.is_json) return;
  std::printf("{\"bench\": \"%s\", \"what\": \"%s\", \"transport\": \"%s\", "
              "\"nbytes\": %" PRIu64 ", \"runs\": %" PRIu64
              ", \"samples\": %zu, \"put_ns\": %.1f, \"p90_ns\": %.1f, "
              "\"floor_ns\": %.1f, \"of_floor\": %.3f, ",
              row.bench.c_str(), row.what.c_str(), row.transport, row.nbytes, row.runs, row.samples,
              row.put_ns, row.p90_ns, row.floor_ns, ratio(row.floor_ns));
  if (row.memcpy_ns > 0) {
    std::printf("\"memcpy_ns\": %.1f, \"of_memcpy\": %.3f, \"copy_kernel\": \"%s\", ",
                row.memcpy_ns, ratio(row.memcpy_ns), copy_kernel());
  }
  if (row.goal > 0) std::printf("\"goal\": %.2f, ", row.goal);
  std::printf("\"cores\": %u}\n", std::thread::hardware_concurrency());
  std::fflush(stdout);
}

}  // namespace kvzc::bench

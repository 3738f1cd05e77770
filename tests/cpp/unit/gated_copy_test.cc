#include "base/gated_copy.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "base/copy.h"
#include "unit/unit_support.h"

namespace kvzc {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kGuardBytes = 64;
constexpr std::byte kGuard{0xa5};
constexpr std::uint64_t kLive = 2;

bool are_all(std::span<const std::byte> bytes, std::byte value) {
  return bytes.empty() ||
         (bytes[0] == value && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

// Gives false if it does not come true within 20 seconds.
template <typename Condition>
bool comes_true(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    sched_yield();
  }
  return true;
}

struct Gate {
  std::atomic<std::uint64_t> epoch{kLive};
  std::atomic<std::uint32_t> is_cut{0};
  CopyGate at(std::uint64_t expected) const { return {&epoch, expected, &is_cut}; }
};

// Copies between buffers that are aligned to a line plus the given shift, with guard bytes on both
// sides of the target, and checks every byte. The source ends where its buffer does.
class CopyBench {
 public:
  explicit CopyBench(std::size_t most) : pattern_(test::Random(42).bytes(most)) {
    target_.resize(most + 4 * kGuardBytes);
  }

  ::testing::AssertionResult copy(std::size_t nbytes, std::size_t source_shift,
                                  std::size_t target_shift, bool streaming, const CopyGate& gate,
                                  bool goes_on = true) {
    source_.reset(new (std::align_val_t{64}) std::byte[source_shift + nbytes]);
    std::byte* source = source_.get() + source_shift;
    std::memcpy(source, pattern_.data(), nbytes);
    const std::size_t aligned = (64 - reinterpret_cast<std::uintptr_t>(target_.data()) % 64) % 64;
    std::byte* target = target_.data() + aligned + kGuardBytes + target_shift;
    std::memset(target - kGuardBytes, static_cast<int>(kGuard), nbytes + 2 * kGuardBytes);
    const bool went_on = gated_copy(target, source, nbytes, streaming, gate);
    copy_fence();
    const bool is_right = went_on == goes_on &&
                          are_all({target - kGuardBytes, kGuardBytes}, kGuard) &&
                          (goes_on ? std::memcmp(target, pattern_.data(), nbytes) == 0
                                   : are_all({target, nbytes}, kGuard)) &&
                          are_all({target + nbytes, kGuardBytes}, kGuard) &&
                          std::memcmp(source, pattern_.data(), nbytes) == 0;
    if (is_right) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << nbytes << " bytes from a source at " << source_shift << " to a target at "
           << target_shift << " mod 64, streaming " << streaming << ", gave " << went_on;
  }

 private:
  struct AlignedDelete {
    void operator()(std::byte* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };
  std::vector<std::byte> pattern_;
  std::vector<std::byte> target_;
  std::unique_ptr<std::byte[], AlignedDelete> source_;
};

// Around every size at which another kernel begins, and around whole steps of each.
const std::vector<std::size_t> kEdges = {0,    1,    3,    4,    7,    8,    9,    15,   16,   17,
                                         31,   33,   63,   64,   65,   127,  128,  129,  191,  255,
                                         256,  257,  511,  513,  769,  2047, 2048, 2049, 2111, 2304,
                                         2367, 4095, 4096, 4097, 4160, 8191, 8192, 70000};

TEST(GatedCopy, CopiesExactlyTheBytesOfEverySize) {
  CopyBench bench(8192);
  const Gate gate;
  test::Random random(5);
  KVZC_TRACE_SEED(random);
  const auto shift = [&] { return static_cast<std::size_t>(random.between(0, 63)); };
  for (std::size_t nbytes = 0; nbytes <= 5000; ++nbytes) {
    for (const bool streaming : {false, true}) {
      ASSERT_TRUE(bench.copy(nbytes, 0, 0, streaming, gate.at(kLive)));
      ASSERT_TRUE(bench.copy(nbytes, shift(), shift(), streaming, gate.at(kLive)));
    }
  }
}

TEST(GatedCopy, CopiesExactlyTheBytesAtAlignmentsOfBothSides) {
  CopyBench bench(70000);
  const Gate gate;
  for (const std::size_t nbytes : kEdges) {
    const std::size_t stride = nbytes > 9000 ? 7 : 1;
    for (std::size_t source = 0; source < 64; source += 3 * stride) {
      for (std::size_t target = 0; target < 64; target += stride) {
        ASSERT_TRUE(bench.copy(nbytes, source, target, true, gate.at(kLive)));
        ASSERT_TRUE(bench.copy(nbytes, source, target, false, gate.at(kLive)));
      }
    }
  }
}

TEST(GatedCopy, CopiesLargePieces) {
  CopyBench bench((8u << 20) + 4096);
  const Gate gate;
  for (const std::size_t nbytes :
       {std::size_t{256} << 10, (std::size_t{1} << 20) - 1, (std::size_t{8} << 20) + 255}) {
    for (const bool streaming : {false, true}) {
      ASSERT_TRUE(bench.copy(nbytes, 0, 0, streaming, gate.at(kLive)));
      ASSERT_TRUE(bench.copy(nbytes, 3, 61, streaming, gate.at(kLive)));
    }
  }
}

TEST(GatedCopy, StoresNothingThroughAShutGate) {
  CopyBench bench(70000);
  Gate gate;
  for (const std::size_t nbytes : kEdges) {
    for (const bool streaming : {false, true}) {
      gate.epoch.store(kLive + 1);
      ASSERT_TRUE(bench.copy(nbytes, 1, 2, streaming, gate.at(kLive), false));
      // The upper half counts too.
      gate.epoch.store(kLive + (std::uint64_t{1} << 32));
      ASSERT_TRUE(bench.copy(nbytes, 1, 2, streaming, gate.at(kLive), false));
      gate.epoch.store(kLive);
      gate.is_cut.store(1u << 31);
      ASSERT_TRUE(bench.copy(nbytes, 1, 2, streaming, gate.at(kLive), false));
      gate.is_cut.store(0);
      ASSERT_TRUE(bench.copy(nbytes, 1, 2, streaming, gate.at(kLive)));
    }
  }
}

TEST(GatedCopy, StopsSoonAfterAnotherThreadShutsTheGate) {
  const std::vector<std::byte> source = test::Random(1).bytes(256 << 10);
  for (const bool by_epoch : {false, true}) {
    for (const bool streaming : {false, true}) {
      Gate gate;
      std::vector<std::byte> target(source.size());
      std::atomic<int> copies{0};
      std::atomic<bool> has_stopped{false};
      std::thread copier([&] {
        while (gated_copy(target.data(), source.data(), source.size(), streaming, gate.at(kLive))) {
          copy_fence();
          copies.fetch_add(1);
        }
        has_stopped.store(true);
      });
      EXPECT_TRUE(comes_true([&] { return copies.load() > 3; }));
      if (by_epoch) {
        gate.epoch.store(kLive + 1);
      } else {
        gate.is_cut.store(1);
      }
      // Not more than the copy that ran, and none that begins after it.
      const int at_shut = copies.load();
      EXPECT_TRUE(comes_true([&] { return has_stopped.load(); }));
      copier.join();
      EXPECT_LE(copies.load(), at_shut + 1);
    }
  }
}

// ---- After being descheduled ----

#define KVZC_SKIP_WITHOUT_RESTART()                                                          \
  if (!can_restart()) {                                                                      \
    GTEST_SKIP() << "copies cannot restart here: needs x86-64 Linux, rseq of glibc 2.35 or " \
                    "later, no sanitizer";                                                   \
  }

TEST(GatedCopy, EveryThreadCanRestartWhereOneCan) {
  bool in_thread = !can_restart();
  std::thread([&] { in_thread = can_restart(); }).join();
  EXPECT_EQ(in_thread, can_restart());
  test::Child child([] { return can_restart() ? 1 : 0; });
  EXPECT_EQ(child.wait(), can_restart() ? "exit 1" : "exit 0");
}

constexpr std::byte kTakenBack{0xee};
constexpr std::byte kWritten{0x11};

// What a signal's handler works on; set while it may come.
struct Interrupted {
  Gate gate;
  std::vector<std::byte> target;
};
Interrupted* interrupted = nullptr;

TEST(GatedCopy, StoresNothingMoreAfterASignalHandlerShutTheGate) {
  KVZC_SKIP_WITHOUT_RESTART();
  const std::vector<std::byte> source(1 << 20, kWritten);
  Interrupted state;
  state.target.resize(source.size());
  interrupted = &state;
  struct sigaction shut{};
  shut.sa_handler = [](int) {
    interrupted->gate.epoch.store(kLive + 1);
    std::memset(interrupted->target.data(), static_cast<int>(kTakenBack),
                interrupted->target.size());
  };
  struct sigaction before{};
  ASSERT_EQ(sigaction(SIGALRM, &shut, &before), 0);
  test::Random random(11);
  KVZC_TRACE_SEED(random);
  for (int round = 0; round < 400; ++round) {
    // From the word kernels, through those for pieces of a page, to those for large pieces.
    const std::size_t nbytes = random.pick<std::size_t>({5, 8, 60, 200, 3000, 64 << 10, 1 << 20});
    const bool streaming = random.one_in(2);
    state.gate.epoch.store(kLive);
    itimerval once{};
    once.it_value.tv_usec = random.between(20, 900);
    ASSERT_EQ(setitimer(ITIMER_REAL, &once, nullptr), 0);
    while (
        gated_copy(state.target.data(), source.data(), nbytes, streaming, state.gate.at(kLive))) {
    }
    copy_fence();
    ASSERT_TRUE(are_all(state.target, kTakenBack))
        << "round " << round << ", " << nbytes << " bytes, streaming " << streaming;
  }
  sigaction(SIGALRM, &before, nullptr);
  interrupted = nullptr;
}

// Gives the state letter of a process's main thread.
char state_of(pid_t pid) {
  const std::string name = std::to_string(pid);
  std::FILE* stat = std::fopen(("/proc/" + name + "/task/" + name + "/stat").c_str(), "re");
  if (stat == nullptr) return '?';
  char line[512];
  const std::string_view text(line, std::fread(line, 1, sizeof line, stat));
  std::fclose(stat);
  const std::size_t at = text.rfind(") ");
  return at == text.npos || at + 2 >= text.size() ? '?' : text[at + 2];
}

// Shared between an owner and its writer.
struct Lent {
  Gate gate;
  // What the writer is to do while the epoch is even.
  std::size_t nbytes;
  std::size_t target_shift;
  bool streaming;
  // What it does.
  std::atomic<std::uint64_t> copies;
  std::atomic<bool> is_copying;
  std::atomic<std::uint64_t> shut_seen;  // The last epoch whose gate it found shut.
};

TEST(GatedCopy, StoppedWriterStoresNotOneMoreByteAfterTheEpochMovedOn) {
  KVZC_SKIP_WITHOUT_RESTART();
  constexpr std::size_t kMost = 1 << 20;
  constexpr int kRounds = 400;
  void* shared = mmap(nullptr, sizeof(Lent) + 64 + kMost + 4096, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  Lent& lent = *new (shared) Lent{};
  lent.gate.epoch.store(1);
  std::byte* region = static_cast<std::byte*>(shared) + 4096;
  static_assert(sizeof(Lent) <= 4096);

  test::Child writer(
      [&] {
        const std::vector<std::byte> source(kMost, kWritten);
        for (std::uint64_t epoch = 2;; epoch += 2) {
          while (lent.gate.epoch.load() != epoch) sched_yield();
          lent.is_copying.store(true);
          while (gated_copy(region + lent.target_shift, source.data(), lent.nbytes, lent.streaming,
                            lent.gate.at(epoch))) {
            lent.is_copying.store(false);
            lent.copies.fetch_add(1);
            lent.is_copying.store(true);
          }
          copy_fence();
          lent.is_copying.store(false);
          lent.shut_seen.store(epoch);
        }
        return 0;
      },
      100);

  test::Random random(23);
  KVZC_TRACE_SEED(random);
  int stopped_in_a_copy = 0;
  for (int round = 0; round < kRounds; ++round) {
    // Every fourth round goes to the kernels for less than a page.
    lent.nbytes = round % 4 == 3 ? random.pick<std::size_t>({8, 40, 200, 3000})
                                 : static_cast<std::size_t>(random.between(64 << 10, kMost - 64));
    lent.target_shift = static_cast<std::size_t>(random.between(0, 63));
    lent.streaming = random.one_in(2);
    const std::uint64_t epoch = lent.gate.epoch.load() + 1;
    const std::uint64_t copies = lent.copies.load();
    lent.gate.epoch.store(epoch);
    ASSERT_TRUE(comes_true([&] { return lent.copies.load() > copies; }));
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::microseconds(random.between(0, 500));
    while (std::chrono::steady_clock::now() < until) {
    }
    ASSERT_EQ(kill(writer.pid(), SIGSTOP), 0);
    ASSERT_TRUE(comes_true([&] { return state_of(writer.pid()) == 'T'; }));
    if (lent.is_copying.load()) ++stopped_in_a_copy;
    // From here on not one more byte may land.
    lent.gate.epoch.store(epoch + 1);
    std::memset(region, static_cast<int>(kTakenBack), kMost);
    ASSERT_EQ(kill(writer.pid(), SIGCONT), 0);
    ASSERT_TRUE(comes_true([&] { return lent.shut_seen.load() == epoch; }));
    ASSERT_TRUE(are_all({region, kMost}, kTakenBack))
        << "round " << round << ", " << lent.nbytes << " bytes, streaming " << lent.streaming;
  }
  // Else this test shows nothing.
  EXPECT_GT(stopped_in_a_copy, kRounds / 2);
  RecordProperty("stopped_in_a_copy", stopped_in_a_copy);
  munmap(shared, sizeof(Lent) + 64 + kMost + 4096);
}

std::atomic<int> ticks{0};

TEST(GatedCopy, IsExactUnderSignalsAndMoreThreadsThanCores) {
  struct sigaction tick{};
  tick.sa_handler = [](int) { ticks.fetch_add(1); };
  tick.sa_flags = SA_RESTART;
  struct sigaction before{};
  ASSERT_EQ(sigaction(SIGPROF, &tick, &before), 0);
  ticks.store(0);
  const itimerval thousand_a_second{{0, 1000}, {0, 1000}};
  ASSERT_EQ(setitimer(ITIMER_PROF, &thousand_a_second, nullptr), 0);

  const Gate gate;
  const std::size_t threads = 2 * std::max(2u, std::thread::hardware_concurrency());
  const auto end = std::chrono::steady_clock::now() + 1500ms;
  std::vector<std::string> failures(threads);
  std::vector<std::thread> copiers;
  for (std::size_t n = 0; n < threads; ++n) {
    copiers.emplace_back([&, n] {
      test::Random random(100 + n);
      CopyBench bench(256 << 10);
      while (std::chrono::steady_clock::now() < end && failures[n].empty()) {
        const std::int64_t most = random.one_in(2) ? 600 : 256 << 10;
        const auto result = bench.copy(static_cast<std::size_t>(random.between(0, most)),
                                       static_cast<std::size_t>(random.between(0, 63)),
                                       static_cast<std::size_t>(random.between(0, 63)),
                                       random.one_in(2), gate.at(kLive));
        if (!result) failures[n] = result.message();
      }
    });
  }
  // Only the copiers take the signals.
  sigset_t profiling;
  sigemptyset(&profiling);
  sigaddset(&profiling, SIGPROF);
  pthread_sigmask(SIG_BLOCK, &profiling, nullptr);
  for (std::thread& copier : copiers) copier.join();
  const itimerval never{};
  setitimer(ITIMER_PROF, &never, nullptr);
  signal(SIGPROF, SIG_IGN);  // What is pending goes away.
  pthread_sigmask(SIG_UNBLOCK, &profiling, nullptr);
  sigaction(SIGPROF, &before, nullptr);
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
  EXPECT_GT(ticks.load(), 20);
}

}  // namespace
}  // namespace kvzc

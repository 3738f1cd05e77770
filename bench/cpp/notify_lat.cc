// notify_lat: a put of 8 bytes with a tag, until the other process has seen the tag. Each process
// keeps to a core.
//
// While both look all the time: half of a round trip, and as floor a ping-pong on one cache line.
// While the other is asleep: from before the put until its waiting call has returned, by the clock
// that both share; floors, woken and measured the same way: a bare futex, a bare eventfd.

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>

#include "base/futex.h"
#include "cpp/harness.h"

namespace kvzc::bench {
namespace {

constexpr std::string_view kTag = "ping";
constexpr std::uint64_t kPingBytes = 8, kLine = 64;
constexpr std::int64_t kPatienceNs = 30'000'000'000;

// What both processes see of the floors, and of how far the other one is.
struct SharedPage {
  alignas(kLine) std::atomic<std::uint32_t> ball{0};     // Whose turn it is.
  alignas(kLine) std::atomic<std::uint32_t> word{0};     // Slept on.
  alignas(kLine) std::atomic<std::uint64_t> waiting{0};  // So many waits were begun ...
  alignas(kLine) std::atomic<std::uint64_t> woken{0};    // ... and so many have ended,
  std::atomic<std::int64_t> woken_ns{0};                 // the last one then.
};

struct Ground {
  SharedPage* page;
  int event;
};

// One end: an engine that can put into the other's memory, and the bare means of the floors.
class Side {
 public:
  Side(const Ground& ground, int socket)
      : page(*ground.page), event_(ground.event), engine_(take(Engine::create({}))) {
    memory_.emplace(*engine_, 2 * kLine);
    region_ = register_one(*engine_, memory_->spec());
    write_text(socket, text_of(take(region_.handle())));
    const RemoteView other = open_handle(*engine_, read_text(socket));
    source_ = bytes_of(take(region_.view()), kLine, kPingBytes);
    echo_source_ = bytes_of(take(region_.view()), 0, kPingBytes);
    target_ = bytes_of(other, 0, kPingBytes);
    // Both are ready.
    write_value(socket, true);
    (void)read_value<bool>(socket);
  }

  void ping() { put(source_); }
  // Sends back what has come in.
  void echo() { put(echo_source_); }
  void wait() {
    const auto arrived = take(engine_->wait_arrivals(kTag, 1, nullptr, clock_ns() + kPatienceNs));
    if (arrived[0].code != Code::kOk) die("a ping failed");
  }
  void poll() {
    while (engine_->poll_arrivals(1).empty()) {
    }
  }
  void wait_fd() {
    do {
      sleep_on(engine_->arrivals_fd());
    } while (engine_->poll_arrivals(1).empty());
  }

  void bare_ping(std::uint32_t turn) { page.ball.store(turn, std::memory_order_release); }
  void bare_wait(std::uint32_t turn) {
    while (page.ball.load(std::memory_order_acquire) != turn) cpu_relax();
  }
  void bare_wake() {
    page.word.store(1);
    futex_wake_all(page.word, FutexScope::kShared);
  }
  void bare_sleep() {
    while (page.word.load() == 0) futex_wait(page.word, 0, kPatienceNs, FutexScope::kShared);
    page.word.store(0);
  }
  void bare_write() {
    const std::uint64_t one = 1;
    write_all(event_, &one, sizeof one);
  }
  void bare_wait_fd() {
    sleep_on(event_);
    std::uint64_t count;
    (void)read_all(event_, &count, sizeof count);
  }

  void refill(std::uint64_t seed) { fill_random_bytes(memory_->data() + kLine, kPingBytes, seed); }
  // Ends the program unless what came back is what was sent.
  void verify() const {
    if (std::memcmp(memory_->data(), memory_->data() + kLine, kPingBytes) != 0) {
      die("the bytes that came back are not those that were sent");
    }
  }

  SharedPage& page;

 private:
  void put(const LocalView& source) {
    TransferOptions options;
    options.notify = kTag;
    const TransferItem item{&source, &target_};
    last_ = take(engine_->try_put({&item, 1}, options));
  }
  static void sleep_on(int fd) {
    pollfd look{fd, POLLIN, 0};
    while (::poll(&look, 1, -1) != 1) {
    }
  }

  const int event_;
  const std::shared_ptr<Engine> engine_;
  std::optional<Memory> memory_;
  Region region_;
  LocalView source_, echo_source_;
  RemoteView target_;
  Transfer last_;
};

// A way to wake a thread that sleeps: by kvzc, or bare.
struct Way {
  void (Side::*wake)();
  void (Side::*sleep)();
};
enum WayName : std::uint64_t { kWait, kFd, kFutex, kEventFd };
constexpr Way kWays[] = {{&Side::ping, &Side::wait},
                         {&Side::ping, &Side::wait_fd},
                         {&Side::bare_wake, &Side::bare_sleep},
                         {&Side::bare_write, &Side::bare_wait_fd}};

// What the other process is asked to do.
enum class Ask : std::uint64_t { kEchoWait, kEchoPoll, kEchoBare, kSleep, kSendBack };
struct Request {
  Ask ask;
  std::uint64_t argument;  // How often; for kSleep a WayName.
};

void answer(const Ground& ground, int socket) {
  Side side(ground, socket);
  for (Request request; read_all(socket, &request, sizeof request);) {
    switch (request.ask) {
      case Ask::kEchoWait:
        for (std::uint64_t i = 0; i < request.argument; ++i) side.wait(), side.echo();
        break;
      case Ask::kEchoPoll:
        for (std::uint64_t i = 0; i < request.argument; ++i) side.poll(), side.echo();
        break;
      case Ask::kEchoBare:
        for (std::uint64_t i = 0; i < request.argument; ++i) side.bare_wait(1), side.bare_ping(0);
        break;
      case Ask::kSleep:
        side.page.waiting.fetch_add(1);
        (side.*kWays[request.argument].sleep)();
        side.page.woken_ns.store(clock_ns());
        side.page.woken.fetch_add(1);
        break;
      case Ask::kSendBack:
        side.echo();
        break;
    }
  }
}

// Says whether the main thread of a process sleeps, as the kernel sees it.
bool is_asleep(int pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  std::FILE* const file = std::fopen(path.c_str(), "re");
  char state = 0;
  if (file != nullptr) {
    if (std::fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 0;
    std::fclose(file);
  }
  return state == 'S';
}

// Keeps the core from going to sleep as well.
void look_busy(std::int64_t ns) {
  for (const std::int64_t until = clock_ns() + ns; clock_ns() < until;) cpu_relax();
}

}  // namespace

void notify_lat(const Options& options, Report& report) {
  void* const mapping =
      mmap(nullptr, sizeof(SharedPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) die("mmap");
  const bool can_spin = has_two_cores();  // Later there is one, for this process.
  const Ground ground{new (mapping) SharedPage, eventfd(0, EFD_CLOEXEC)};
  OtherProcess other(Cores::kOneEach, [&](int socket) { answer(ground, socket); });
  Side side(ground, other.socket());
  SharedPage& page = side.page;
  std::uint64_t seed = 0;

  if (can_spin) {
    constexpr std::uint32_t kCount = 50;  // Few, so that most samples keep their cores.
    // One more before the clock starts: the other process is at it then.
    const auto there_and_back = [&](Ask ask, std::function<void()> once) {
      const Operation operation{once,
                                [&, ask, once] {
                                  side.refill(++seed);
                                  write_value(other.socket(), Request{ask, kCount + 1});
                                  once();
                                },
                                [&, ask] {
                                  if (ask != Ask::kEchoBare) side.verify();
                                }};
      return [one = timed(operation, kCount)] { return one() / 2; };
    };
    const Sampler floor =
        there_and_back(Ask::kEchoBare, [&] { side.bare_ping(1), side.bare_wait(0); });
    const auto add = [&](const char* what, Ask ask, std::function<void()> once) {
      const Medians medians =
          take_turns(options.seconds_per_row, {there_and_back(ask, once), floor});
      report.add("notify_lat", what, kPingBytes, medians, within_ns(1000));
    };
    add("wait, spinning", Ask::kEchoWait, [&] { side.ping(), side.wait(); });
    add("poll, spinning", Ask::kEchoPoll, [&] { side.ping(), side.poll(); });
  }

  // Until the kernel shows the other one asleep in what it was told to wait for, and a while
  // longer.
  const auto wake_up = [&](WayName way) {
    return [&, way] {
      side.refill(++seed);
      const std::uint64_t waiting = page.waiting.load(), woken = page.woken.load();
      write_value(other.socket(), Request{Ask::kSleep, way});
      while (page.waiting.load() == waiting) cpu_relax();
      do {
        look_busy(1'000'000);
      } while (!is_asleep(other.pid()));
      look_busy(1'000'000);
      const std::int64_t start = clock_ns();
      (side.*kWays[way].wake)();
      while (page.woken.load() == woken) cpu_relax();
      const double took = static_cast<double>(page.woken_ns.load() - start);
      if (kWays[way].wake == &Side::ping) {
        write_value(other.socket(), Request{Ask::kSendBack, 0});
        side.wait();
        side.verify();
      }
      return took;
    };
  };
  const auto add = [&](const char* what, WayName way, WayName floor) {
    const Medians medians = take_turns(options.seconds_per_row, {wake_up(way), wake_up(floor)});
    report.add("notify_lat", what, kPingBytes, medians, times_floor(1.5));
  };
  add("wait, asleep; floor: futex", kWait, kFutex);
  add("fd, asleep; floor: eventfd", kFd, kEventFd);
  close(ground.event);
}

}  // namespace kvzc::bench

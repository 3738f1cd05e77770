// The room of trouble over a small transport that works: it copies, in the caller's thread or when
// it is told to, and writes down in which order it did what.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <thread>

#include "base/clock.h"
#include "base/doorbell.h"
#include "base/fence_board.h"
#include "transport/fault/factory.h"
#include "transport/fault/timer.h"
#include "transport/fault/trouble.h"
#include "unit/unit_support.h"

namespace kvzc::fault {
namespace {

constexpr std::uint64_t kToken = 77;
constexpr double kEver = std::numeric_limits<double>::infinity();

struct PlainMemory final : RemoteMemory {
  explicit PlainMemory(std::vector<std::byte> from) : bytes(std::move(from)) {}
  std::uint64_t nbytes() const override { return bytes.size(); }
  std::optional<std::int64_t> offset_of(const MemoryPiece&) const override { return std::nullopt; }
  std::vector<std::byte> bytes;
};

// What the plain channel did. Thread: any.
class Journal {
 public:
  struct Entry {
    std::string what;  // "copy", "tag", "lose", "stop"
    std::string text;
    Code code = Code::kOk;
    std::uint64_t remote = 0;
    std::uint64_t nbytes = 0;
  };
  void write(Entry entry) {
    std::lock_guard lock(mutex_);
    entries_.push_back(std::move(entry));
  }
  std::vector<Entry> entries() const {
    std::lock_guard lock(mutex_);
    return entries_;
  }
  std::vector<Entry> of(std::string_view what) const {
    std::vector<Entry> out = entries();
    std::erase_if(out, [what](const Entry& each) { return each.what != what; });
    return out;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

enum class Pace { kAtOnce, kWhenTold };

class PlainChannel final : public Channel {
 public:
  PlainChannel(TransportHost& host, Journal& journal, Pace pace, std::uint64_t token)
      : host_(host), journal_(journal), pace_(pace), token_(token) {}
  ~PlainChannel() override { EXPECT_TRUE(queue_.empty()) << "destroyed with operations on it"; }

  void post(Operation& operation) override {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(&operation);
    }
    operation.retain();
    operation.channel.store(this);
    if (pace_ == Pace::kAtOnce) run(operation);
    if (operation.release()) ADD_FAILURE() << "the poster keeps no reference";
  }
  void help(Operation& operation, std::int64_t) override {
    ++helps;
    run(operation);
  }
  void abort(Operation& operation) override {
    EXPECT_TRUE(operation.has_failed());
    run(operation);
  }
  // Copies all that waits.
  void run_all() {
    for (;;) {
      Operation* operation = nullptr;
      {
        std::lock_guard lock(mutex_);
        if (queue_.empty()) return;
        operation = queue_.front();
      }
      run(*operation);
    }
  }
  std::size_t waiting() {
    std::lock_guard lock(mutex_);
    return queue_.size();
  }

  Status take_credit(std::size_t) override {
    ++credits;
    return Status::ok();
  }
  void return_credit(std::size_t) override { --credits; }
  void wait_for_credit(std::size_t, std::int64_t) override {}
  Status look_at_grant(FenceTicket) override { return Status::ok(); }
  void send_tag(const Tag& tag, Code code) override {
    if (lost().is_ok()) journal_.write({"tag", std::string(tag.view()), code, 0, 0});
  }
  void drain() override { host_.peers.arrived(token_, "from the peer", Code::kOk); }
  void grant_credits(std::uint32_t count) override { granted += count; }
  Status fence(std::span<const FenceTicket>, std::int64_t) override { return Status::ok(); }
  Status cut_off(std::int64_t) override { return Status::ok(); }
  void lose(Status why, PeerFate) override {
    std::lock_guard lock(mutex_);
    if (why_.is_ok()) why_ = why;
  }
  Status lost() const override {
    std::lock_guard lock(mutex_);
    return why_;
  }
  bool is_quiet() const override { return true; }
  std::string explain(const RemoteMemory&) const override { return "plainly"; }
  // As if the transport itself had found the end.
  void break_down(const Status& why) {
    lose(why, PeerFate::kUnknown);
    host_.peers.channel_lost(token_);
  }

  std::atomic<int> helps{0}, credits{0};
  std::atomic<std::uint32_t> granted{0};
  Status refusal;  // With it ends every operation, if it is not ok.

 private:
  void run(Operation& operation) {
    {
      std::lock_guard lock(mutex_);
      if (std::erase(queue_, &operation) == 0) return;  // Another thread has it.
    }
    if (Status why = lost(); !why.is_ok()) operation.fail(why);
    if (!refusal.is_ok()) operation.fail(refusal);
    if (!operation.has_failed()) copy(operation);
    host_.operations.retire(operation, operation.failure());
  }
  void copy(const Operation& operation) {
    std::uint64_t total = 0;
    for (const Segment& segment : operation.segments) {
      auto& memory = static_cast<PlainMemory&>(*segment.remote);
      for (std::uint32_t i = 0; i < segment.run_count; ++i) {
        const Run& run = operation.runs[segment.first_run + i];
        std::byte* const remote = memory.bytes.data() + run.remote;
        if (operation.direction == Direction::kPut) {
          std::memcpy(remote, run.local, run.nbytes);
        } else {
          std::memcpy(run.local, remote, run.nbytes);
        }
        total += run.nbytes;
      }
    }
    EXPECT_EQ(total, operation.nbytes);
    EXPECT_FALSE(operation.has_tag);
    journal_.write({"copy", "", Code::kOk, operation.runs.at(0).remote, total});
  }

  TransportHost& host_;
  Journal& journal_;
  const Pace pace_;
  const std::uint64_t token_;
  mutable std::mutex mutex_;
  std::deque<Operation*> queue_;
  Status why_;
};

class PlainTransport final : public Transport {
 public:
  PlainTransport(TransportHost& host, Journal& journal, Pace pace)
      : host_(host), journal_(journal), pace_(pace) {}
  const char* name() const override { return "plain"; }
  bool is_local() const override { return true; }
  bool enforces_access() const override { return false; }
  Result<Blob> describe(const MemoryPiece&, Access) override { return Blob(); }
  Status prepare(const MemoryPiece&) override { return Status::ok(); }
  Result<std::shared_ptr<RemoteMemory>> import_memory(Blob, std::uint64_t nbytes,
                                                      const PeerProcess&) override {
    return std::shared_ptr<RemoteMemory>(
        std::make_shared<PlainMemory>(std::vector<std::byte>(nbytes)));
  }
  Result<std::unique_ptr<ChannelHalf>> open_channel() override {
    return std::unique_ptr<ChannelHalf>(std::make_unique<Half>(*this));
  }
  bool stop(std::int64_t) override {
    journal_.write({"stop", "", Code::kOk, 0, 0});
    return true;
  }

  PlainChannel* channel = nullptr;

 private:
  struct Half final : ChannelHalf {
    explicit Half(PlainTransport& of) : transport(of) {}
    Result<Blob> offer() override { return Blob(); }
    Result<std::unique_ptr<Channel>> join(Blob, const ChannelPeer& peer) override {
      auto made = std::make_unique<PlainChannel>(transport.host_, transport.journal_,
                                                 transport.pace_, peer.token);
      transport.channel = made.get();
      return std::unique_ptr<Channel>(std::move(made));
    }
    PlainTransport& transport;
  };

  TransportHost& host_;
  Journal& journal_;
  const Pace pace_;
};

// An operation as an engine would make it, that counts its ends.
struct TestOperation final : Operation {
  std::atomic<int> ends{0};
  Code code() const { return state.status().code(); }
};

class TestEngine final : public OperationSink, public PeerSink {
 public:
  void retire(Operation& operation, Status status) override {
    auto& own = static_cast<TestOperation&>(operation);
    EXPECT_EQ(++own.ends, 1);
    // With the lock: whoever saw the end may take the operation away.
    std::lock_guard lock(mutex_);
    own.state.end(std::move(status), now_ns());
    EXPECT_FALSE(own.release()) << "the test keeps a reference";
    has_ended_.notify_all();
  }
  void retain(Operation& operation) override { operation.retain(); }
  void release(Operation& operation) override {
    EXPECT_FALSE(operation.release()) << "the test keeps a reference";
  }
  void arrived(std::uint64_t token, std::string_view tag, Code) override {
    EXPECT_EQ(token, kToken);
    EXPECT_EQ(tag, "from the peer");
    ++arrivals;
  }
  void channel_lost(std::uint64_t token) override {
    EXPECT_EQ(token, kToken);
    std::lock_guard lock(mutex_);
    ++losses;
    has_ended_.notify_all();
  }
  bool wait(const TestOperation& operation, double seconds = 20) {
    std::unique_lock lock(mutex_);
    return has_ended_.wait_for(lock, std::chrono::duration<double>(seconds),
                               [&] { return operation.state.has_ended(); });
  }
  bool wait_for_loss(double seconds = 20) {
    std::unique_lock lock(mutex_);
    return has_ended_.wait_for(lock, std::chrono::duration<double>(seconds),
                               [&] { return losses.load() != 0; });
  }

  std::atomic<int> arrivals{0}, losses{0};

 private:
  std::mutex mutex_;
  std::condition_variable has_ended_;
};

// One side of a connection over the plain transport with trouble.
struct Bench {
  explicit Bench(const FaultOptions& options, Pace pace = Pace::kAtOnce) {
    Result<std::unique_ptr<Transport>> made =
        make_transport(host, options, [&](TransportHost& inner) {
          auto bare = std::make_unique<PlainTransport>(inner, journal, pace);
          plain_transport = bare.get();
          return Result<std::unique_ptr<Transport>>(std::move(bare));
        });
    EXPECT_TRUE(made.is_ok()) << made.status().to_string();
    transport = made.take();
    channel = transport->open_channel().take()->join(Blob(), {kToken, {}, nullptr, nullptr}).take();
    plain = plain_transport->channel;
  }
  ~Bench() {
    channel.reset();
    EXPECT_TRUE(transport->stop(INT64_MAX));
    for (const auto& operation : operations) {
      EXPECT_EQ(operation->ends, 1);
      EXPECT_TRUE(operation->release()) << "somebody still refers to it";
    }
  }

  TestOperation& make(std::optional<std::string_view> tag = std::nullopt) {
    operations.push_back(std::make_unique<TestOperation>());
    TestOperation& out = *operations.back();
    out.retain();  // The test's.
    out.retain();  // The engine's, until it is retired.
    out.state.restart(now_ns());
    if (tag) {
      out.has_tag = true;
      out.tag.nbytes = static_cast<std::uint8_t>(tag->size());
      std::memcpy(out.tag.bytes, tag->data(), tag->size());
    }
    return out;
  }
  // One segment, one run, from the begin of both.
  TestOperation& make_put(std::vector<std::byte>& source, PlainMemory& target,
                          std::optional<std::string_view> tag = std::nullopt) {
    TestOperation& out = make(tag);
    out.runs.push_back({source.data(), 0, source.size()});
    out.segments.push_back({0, 1, &target});
    out.nbytes = source.size();
    return out;
  }
  Code post_and_wait(TestOperation& operation) {
    channel->post(operation);
    EXPECT_TRUE(engine.wait(operation));
    return operation.code();
  }
  void cancel(TestOperation& operation) {
    operation.fail(Status(Code::kCancelled, "cancelled"));
    channel->abort(operation);
  }

  Doorbell doorbell;
  FenceBoard fences;
  TestEngine engine;
  TransportHost host{doorbell, fences, engine, engine, {}};
  Journal journal;
  PlainTransport* plain_transport = nullptr;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Channel> channel;
  PlainChannel* plain = nullptr;
  std::vector<std::unique_ptr<TestOperation>> operations;
};

FaultOptions slow(double seconds) {
  FaultOptions options;
  options.stripe_bytes = 64;
  options.most_delay_seconds = seconds;
  options.reorder = true;
  return options;
}

void pause(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

int threads_named_fault_now() {
  int count = 0;
  DIR* directory = opendir("/proc/self/task");
  while (const dirent* task = readdir(directory)) {
    char name[32] = {};
    std::FILE* file =
        std::fopen((std::string("/proc/self/task/") + task->d_name + "/comm").c_str(), "re");
    if (file == nullptr) continue;
    if (std::fgets(name, sizeof name, file) != nullptr) count += name == std::string("kvzc-fault\n");
    std::fclose(file);
  }
  closedir(directory);
  return count;
}

// The kernel lists a thread for a moment after it was joined, so this waits for the number.
int threads_named_fault(int expected) {
  const std::int64_t patience = now_ns() + 2'000'000'000;
  while (threads_named_fault_now() != expected && now_ns() < patience) std::this_thread::yield();
  return threads_named_fault_now();
}

// ---- Cutting and drawing ----

TEST(FaultCut, CoversEveryByteOnceAndNoStripeIsLonger) {
  test::Random random(5);
  KVZC_TRACE_SEED(random);
  for (int round = 0; round < 300; ++round) {
    Operation operation;
    std::uint64_t total = 0;
    for (std::int64_t s = random.between(0, 4); s > 0; --s) {
      const auto first = static_cast<std::uint32_t>(operation.runs.size());
      for (std::int64_t r = random.between(1, 5); r > 0; --r) {
        const auto nbytes = static_cast<std::uint64_t>(random.between(1, 40));
        operation.runs.push_back({nullptr, 0, nbytes});
        total += nbytes;
      }
      const auto count = static_cast<std::uint32_t>(operation.runs.size()) - first;
      operation.segments.push_back({first, count, nullptr});
    }
    const auto limit = static_cast<std::uint64_t>(random.between(0, 50));
    std::uint64_t covered = 0;
    const std::vector<Cut> cuts = cut(operation, limit);
    for (const Cut& each : cuts) {
      std::uint64_t before = each.skip_bytes;
      for (std::uint32_t r = 0; r < each.run; ++r) before += operation.runs[r].nbytes;
      ASSERT_EQ(before, covered);
      ASSERT_LT(each.skip_bytes, operation.runs[each.run].nbytes);
      ASSERT_GE(each.run, operation.segments[each.segment].first_run);
      ASSERT_LT(each.run, operation.segments[each.segment].first_run +
                              operation.segments[each.segment].run_count);
      ASSERT_GT(each.nbytes, 0u);
      ASSERT_TRUE(limit == 0 || each.nbytes <= limit);
      covered += each.nbytes;
    }
    ASSERT_EQ(covered, total);
    ASSERT_TRUE(limit != 0 || cuts.size() <= 1);
  }
}

Operation& of_bytes(Operation& operation, std::uint64_t nbytes) {
  operation.runs = {{nullptr, 0, nbytes}};
  operation.segments = {{0, 1, nullptr}};
  return operation;
}

TEST(FaultDice, OneSeedGivesOneSequenceAndAnotherSeedAnother) {
  FaultOptions options = slow(0.01);
  options.post_failure = options.stripe_failure = options.completion_loss = 0.3;
  const auto draw = [&](std::uint64_t seed) {
    options.seed = seed;
    Dice dice(options);
    std::vector<std::int64_t> out;
    for (std::uint64_t i = 0; i < 50; ++i) {
      Operation operation;
      const Trouble trouble = dice.trouble_for(of_bytes(operation, 64 * (i % 7)));
      out.push_back(trouble.fails_at_once + 2 * trouble.fails_midway + 4 * trouble.loses_completion);
      out.push_back(trouble.end_delay_ns);
      for (const Cut& each : trouble.cuts) {
        out.push_back(each.delay_ns);
        out.push_back(static_cast<std::int64_t>(each.skip_bytes));
      }
      out.push_back(dice.delay_ns());
    }
    return out;
  };
  EXPECT_EQ(draw(3), draw(3));
  EXPECT_NE(draw(3), draw(4));
  EXPECT_NE(draw(0), draw(1));
}

TEST(FaultDice, ChancesAreMetAndTheirEdgesAreNeverAndAlways) {
  for (const double chance : {0.0, 0.25, 1.0}) {
    for (int kind = 0; kind < 3; ++kind) {
      FaultOptions options;
      options.stripe_bytes = 10;
      (kind == 0 ? options.post_failure
                 : (kind == 1 ? options.stripe_failure : options.completion_loss)) = chance;
      Dice dice(options);
      int hits = 0;
      for (int i = 0; i < 2000; ++i) {
        Operation operation;
        const Trouble trouble = dice.trouble_for(of_bytes(operation, 100));
        hits += kind == 0 ? trouble.fails_at_once
                          : (kind == 1 ? trouble.fails_midway : trouble.loses_completion);
        EXPECT_EQ(trouble.end_delay_ns, 0);
      }
      EXPECT_NEAR(hits / 2000.0, chance, chance == 0.25 ? 0.05 : 0.0) << "kind " << kind;
    }
  }
}

TEST(FaultDice, AFailureMidwayLeavesAtLeastOneStripeAndNotAll) {
  FaultOptions options;
  options.stripe_bytes = 10;
  options.stripe_failure = 1;
  Dice dice(options);
  std::set<std::size_t> counts;
  for (int i = 0; i < 500; ++i) {
    Operation operation;
    counts.insert(dice.trouble_for(of_bytes(operation, 50)).cuts.size());
  }
  EXPECT_EQ(counts, (std::set<std::size_t>{1, 2, 3, 4}));
  Operation single, empty;
  EXPECT_EQ(dice.trouble_for(of_bytes(single, 5)).cuts.size(), 1u);
  EXPECT_FALSE(dice.trouble_for(empty).fails_midway);
}

TEST(FaultDice, StripesKeepTheirOrderUnlessItIsToBeRandom) {
  for (const bool reorder : {false, true}) {
    FaultOptions options = slow(0.01);
    options.reorder = reorder;
    Dice dice(options);
    int in_order = 0;
    for (int i = 0; i < 200; ++i) {
      Operation operation;
      const Trouble trouble = dice.trouble_for(of_bytes(operation, 64 * 10));
      std::uint64_t first = 0;
      std::int64_t last_delay = 0;
      bool is_in_order = true;
      for (const Cut& each : trouble.cuts) {
        is_in_order = is_in_order && each.skip_bytes >= first;
        first = each.skip_bytes;
        EXPECT_GE(each.delay_ns, last_delay);
        EXPECT_LE(each.delay_ns, 10'000'000);
        last_delay = each.delay_ns;
      }
      in_order += is_in_order;
    }
    EXPECT_EQ(in_order, reorder ? 0 : 200);
  }
}

TEST(FaultTransport, RefusesWhatIsNoChanceAndNoTime) {
  Doorbell doorbell;
  FenceBoard fences;
  TestEngine engine;
  TransportHost host{doorbell, fences, engine, engine, {}};
  const auto code_of = [&](auto change) {
    FaultOptions options;
    change(options);
    return make_transport(host, options,
                          [](TransportHost&) -> Result<std::unique_ptr<Transport>> {
                            return Status(Code::kUnsupported, "asked for");
                          })
        .status()
        .code();
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double chance : {-0.1, 1.1, nan, kEver}) {
    EXPECT_EQ(code_of([&](auto& o) { o.post_failure = chance; }), Code::kInvalidArgument);
    EXPECT_EQ(code_of([&](auto& o) { o.stripe_failure = chance; }), Code::kInvalidArgument);
    EXPECT_EQ(code_of([&](auto& o) { o.completion_loss = chance; }), Code::kInvalidArgument);
  }
  for (const double seconds : {-1.0, nan, kEver}) {
    EXPECT_EQ(code_of([&](auto& o) { o.most_delay_seconds = seconds; }), Code::kInvalidArgument);
  }
  EXPECT_EQ(code_of([&](auto& o) { o.detection_seconds = nan; }), Code::kInvalidArgument);
  // Otherwise the inner transport's own words count.
  EXPECT_EQ(code_of([&](auto& o) { o.detection_seconds = kEver; }), Code::kUnsupported);
}

// ---- Timer ----

TEST(FaultTimer, RunsInOrderOfTimeAndForgets) {
  Timer timer;
  EXPECT_FALSE(timer.run_at(0, nullptr, [] {}));  // No thread runs.
  ASSERT_TRUE(timer.start().is_ok());
  std::mutex mutex;
  std::vector<int> ran;
  const int owner = 0, other = 0;
  const std::int64_t soon = now_ns() + 20'000'000;
  for (const int place : {3, 1, 2}) {
    EXPECT_TRUE(timer.run_at(soon + place * 1'000'000, &owner, [&, place] {
      std::lock_guard lock(mutex);
      ran.push_back(place);
    }));
  }
  timer.run_at(soon + 1'500'000, &other, [&] {
    std::lock_guard lock(mutex);
    ran.push_back(99);
  });
  timer.run_at(INT64_MAX, &owner, [] { ADD_FAILURE(); });
  timer.forget(&other);
  pause(0.1);
  {
    std::lock_guard lock(mutex);
    EXPECT_EQ(ran, (std::vector<int>{1, 2, 3}));
  }
  timer.stop();
  EXPECT_FALSE(timer.run_at(0, &owner, [] {}));
}

TEST(FaultTimer, ForgetWaitsForWhatRunsButNotForItself) {
  Timer timer;
  ASSERT_TRUE(timer.start().is_ok());
  std::atomic<int> stage{0};
  const int owner = 0;
  timer.run_at(0, &owner, [&] {
    stage = 1;
    pause(0.05);
    timer.forget(&owner);
    stage = 2;
  });
  while (stage == 0) std::this_thread::yield();
  timer.forget(&owner);
  EXPECT_EQ(stage, 2);
}

TEST(FaultTimer, ForgetAlsoDropsWhatTheRunningTaskAsksFor) {
  Timer timer;
  ASSERT_TRUE(timer.start().is_ok());
  std::atomic<bool> has_begun{false};
  const int owner = 0;
  timer.run_at(0, &owner, [&] {
    has_begun = true;
    pause(0.05);
    timer.run_at(now_ns() + 30'000'000, &owner, [] { ADD_FAILURE() << "forgotten, but it ran"; });
  });
  while (!has_begun) std::this_thread::yield();
  timer.forget(&owner);
  pause(0.06);
}

TEST(FaultTimer, ItsThreadTakesNoSignals) {
  FaultOptions options = slow(0.001);
  Bench bench(options);
  sigset_t seen;
  sigemptyset(&seen);
  Timer timer;
  ASSERT_TRUE(timer.start().is_ok());
  std::atomic<bool> has_run{false};
  timer.run_at(0, &timer, [&] {
    pthread_sigmask(SIG_SETMASK, nullptr, &seen);
    has_run = true;
  });
  while (!has_run) std::this_thread::yield();
  for (const int signal : {SIGINT, SIGTERM, SIGALRM, SIGUSR1}) {
    EXPECT_EQ(sigismember(&seen, signal), 1) << signal;
  }
  EXPECT_EQ(threads_named_fault(2), 2);
}

// ---- Data ----

TEST(FaultChannel, WithoutTroubleItPassesEverythingOn) {
  Bench bench({});
  EXPECT_EQ(threads_named_fault(0), 0);
  EXPECT_STREQ(bench.transport->name(), "plain");
  EXPECT_EQ((*bench.transport->import_memory(Blob(), 12, {}))->nbytes(), 12u);
  test::Random random(1);
  std::vector<std::byte> source = random.bytes(1000);
  PlainMemory target(std::vector<std::byte>(1000));
  EXPECT_EQ(bench.post_and_wait(bench.make_put(source, target, "tag")), Code::kOk);
  EXPECT_EQ(target.bytes, source);
  EXPECT_EQ(bench.post_and_wait(bench.make("alone")), Code::kOk);
  EXPECT_EQ(bench.post_and_wait(bench.make()), Code::kOk);  // As connect() does.
  const auto entries = bench.journal.entries();
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].nbytes, 1000u);
  EXPECT_EQ(entries[1].text, "tag");
  EXPECT_EQ(entries[2].text, "alone");
  bench.channel->drain();
  EXPECT_EQ(bench.engine.arrivals, 1);
  EXPECT_TRUE(bench.channel->take_credit(3).is_ok());
  EXPECT_TRUE(bench.channel->take_credit(3).is_ok());
  bench.channel->return_credit(3);
  EXPECT_EQ(bench.plain->credits, 1);
  bench.channel->grant_credits(4);
  EXPECT_EQ(bench.plain->granted, 4u);
  EXPECT_TRUE(bench.channel->is_quiet());
  bench.plain->break_down(Status(Code::kProtocol, "damaged"));
  EXPECT_EQ(bench.engine.losses, 1);
  EXPECT_EQ(bench.channel->lost().code(), Code::kProtocol);
}

// Many transfers of many runs in several memories, both ways, with and without delays.
void check_exact_bytes(const FaultOptions& options, Pace pace) {
  test::Random random(options.seed);
  KVZC_TRACE_SEED(random);
  Bench bench(options, pace);
  for (int round = 0; round < 40; ++round) {
    const bool is_put = random.one_in(2);
    std::vector<std::unique_ptr<PlainMemory>> memories;
    std::vector<std::byte> local = random.bytes(7500);
    for (int i = 0; i < 3; ++i) {
      memories.push_back(std::make_unique<PlainMemory>(random.bytes(3000)));
    }
    std::vector<std::byte> expected_local = local;
    std::vector<std::vector<std::byte>> expected;
    for (const auto& each : memories) expected.push_back(each->bytes);
    const std::string tag = "tag " + std::to_string(round);
    TestOperation& operation = bench.make(tag);
    operation.direction = is_put ? Direction::kPut : Direction::kGet;
    std::uint64_t at = 0;
    for (std::size_t m = 0; m < memories.size(); ++m) {
      const auto first = static_cast<std::uint32_t>(operation.runs.size());
      for (std::uint64_t remote = 0; remote < 2000;) {
        const auto nbytes = static_cast<std::uint64_t>(random.between(1, 400));
        operation.runs.push_back({local.data() + at, remote, nbytes});
        std::byte* const there = expected[m].data() + remote;
        if (is_put) std::memcpy(there, &expected_local[at], nbytes);
        if (!is_put) std::memcpy(&expected_local[at], there, nbytes);
        at += nbytes;
        remote += nbytes + static_cast<std::uint64_t>(random.between(0, 100));
        operation.nbytes += nbytes;
      }
      const auto count = static_cast<std::uint32_t>(operation.runs.size()) - first;
      operation.segments.push_back({first, count, memories[m].get()});
    }
    bench.channel->post(operation);
    std::atomic<bool> is_over{false};
    std::thread worker([&] {
      while (!is_over) {
        bench.plain->run_all();
        std::this_thread::yield();
      }
    });
    bench.channel->help(operation, INT64_MAX);
    EXPECT_TRUE(bench.engine.wait(operation));
    is_over = true;
    worker.join();
    ASSERT_EQ(operation.code(), Code::kOk);
    for (std::size_t m = 0; m < memories.size(); ++m) ASSERT_EQ(memories[m]->bytes, expected[m]);
    ASSERT_EQ(local, expected_local);
    // Its tag is the last that was written down.
    const auto entries = bench.journal.entries();
    ASSERT_EQ(entries.back().what, "tag");
    ASSERT_EQ(entries.back().text, tag);
    ASSERT_EQ(entries.back().code, Code::kOk);
  }
  const auto copies = bench.journal.of("copy");
  EXPECT_GT(copies.size(), options.stripe_bytes == 0 ? 1u : 100u);
  for (const Journal::Entry& each : copies) {
    EXPECT_TRUE(options.stripe_bytes == 0 || each.nbytes <= options.stripe_bytes);
  }
}

TEST(FaultChannel, MovesExactlyTheBytesWhateverTheStripesAndTheirOrder) {
  for (const Pace pace : {Pace::kAtOnce, Pace::kWhenTold}) {
    for (const std::uint64_t stripe : {0u, 1000u, 64u}) {
      for (const double delay : {0.0, 0.0005}) {
        FaultOptions options = slow(delay);
        options.seed = stripe + 1;
        options.stripe_bytes = stripe;
        check_exact_bytes(options, pace);
      }
    }
  }
}

TEST(FaultChannel, StripesBeginInRandomOrderOnlyWhenAsked) {
  for (const bool reorder : {false, true}) {
    FaultOptions options = slow(0.0005);
    options.reorder = reorder;
    Bench bench(options);
    std::vector<std::byte> source(64 * 40);
    PlainMemory target(source);
    EXPECT_EQ(bench.post_and_wait(bench.make_put(source, target)), Code::kOk);
    std::vector<std::uint64_t> order;
    for (const auto& each : bench.journal.of("copy")) order.push_back(each.remote);
    EXPECT_EQ(order.size(), 40u);
    EXPECT_EQ(std::is_sorted(order.begin(), order.end()), !reorder);
  }
}

TEST(FaultChannel, ManyThreadsPostAndEachTagFollowsItsOwnBytes) {
  FaultOptions options = slow(0.0005);
  Bench bench(options);
  constexpr int kThreads = 4, kEach = 50;
  std::vector<TestOperation*> operations;
  std::vector<std::unique_ptr<PlainMemory>> targets;
  std::vector<std::vector<std::byte>> sources(kThreads * kEach, std::vector<std::byte>(300));
  for (int i = 0; i < kThreads * kEach; ++i) {
    targets.push_back(std::make_unique<PlainMemory>(std::vector<std::byte>(100'000)));
    operations.push_back(&bench.make_put(sources[static_cast<std::size_t>(i)], *targets.back(),
                                         std::to_string(i)));
    // Each at a place of its own, by which the journal knows it.
    operations.back()->runs[0].remote = static_cast<std::uint64_t>(i) * 300;
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        bench.channel->post(*operations[static_cast<std::size_t>(t * kEach + i)]);
      }
      for (int i = 0; i < kEach; ++i) {
        EXPECT_TRUE(bench.engine.wait(*operations[static_cast<std::size_t>(t * kEach + i)]));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::map<std::uint64_t, std::uint64_t> moved;
  int tags = 0;
  for (const Journal::Entry& each : bench.journal.entries()) {
    if (each.what == "copy") moved[each.remote / 300] += each.nbytes;
    if (each.what != "tag") continue;
    ++tags;
    EXPECT_EQ(moved[std::stoull(each.text)], 300u);
  }
  EXPECT_EQ(tags, kThreads * kEach);
}

TEST(FaultChannel, WaitingThreadsHelpButDoNotDefeatADelay) {
  std::vector<std::byte> source(64 * 4, std::byte{1});
  PlainMemory target(std::vector<std::byte>(source.size()));
  {
    FaultOptions options = slow(0);
    Bench bench(options, Pace::kWhenTold);
    TestOperation& operation = bench.make_put(source, target);
    bench.channel->post(operation);
    EXPECT_EQ(bench.plain->waiting(), 4u);
    bench.channel->help(operation, now_ns() - 1);
    EXPECT_EQ(bench.plain->waiting(), 4u);
    bench.channel->help(operation, INT64_MAX);
    EXPECT_EQ(operation.ends, 1);
    bench.channel->help(operation, INT64_MAX);  // It is over: nothing to do.
    EXPECT_EQ(target.bytes, source);
  }
  {
    Bench bench(slow(100), Pace::kWhenTold);
    TestOperation& operation = bench.make_put(source, target);
    bench.channel->post(operation);
    bench.channel->help(operation, INT64_MAX);
    EXPECT_EQ(bench.plain->waiting(), 0u);
    EXPECT_EQ(operation.ends, 0);
    bench.cancel(operation);
    EXPECT_EQ(operation.ends, 1);
  }
}

// ---- Each kind of trouble: one end, and the promises hold ----

TEST(FaultChannel, APostFailureEndsAtOnceAndNothingHasMoved) {
  FaultOptions options = slow(100);
  options.post_failure = 1;
  Bench bench(options);
  std::vector<std::byte> source(1000, std::byte{1});
  PlainMemory target(std::vector<std::byte>(1000));
  TestOperation& operation = bench.make_put(source, target, "tag");
  bench.channel->post(operation);
  EXPECT_EQ(operation.ends, 1);
  EXPECT_EQ(operation.code(), Code::kSystem);
  EXPECT_NE(operation.state.status().text().find("injected"), std::string_view::npos);
  EXPECT_TRUE(bench.journal.of("copy").empty());
  ASSERT_EQ(bench.journal.of("tag").size(), 1u);
  EXPECT_EQ(bench.journal.of("tag")[0].code, Code::kSystem);
}

TEST(FaultChannel, AStripeFailureComesAfterSomeBytesAndBeforeTheLast) {
  for (const Pace pace : {Pace::kAtOnce, Pace::kWhenTold}) {
    FaultOptions options = slow(0.0005);
    options.stripe_failure = 1;
    Bench bench(options, pace);
    std::vector<std::byte> source(64 * 8, std::byte{1});
    for (int round = 0; round < 20; ++round) {
      PlainMemory target(std::vector<std::byte>(source.size()));
      const std::size_t before = bench.journal.entries().size();
      TestOperation& operation = bench.make_put(source, target, "tag");
      bench.channel->post(operation);
      const std::int64_t patience = now_ns() + 10'000'000'000;
      while (operation.ends == 0 && now_ns() < patience) bench.plain->run_all();
      ASSERT_TRUE(bench.engine.wait(operation));
      EXPECT_EQ(operation.code(), Code::kSystem);
      EXPECT_NE(operation.state.status().text().find("injected"), std::string_view::npos);
      const auto moved = std::count(target.bytes.begin(), target.bytes.end(), std::byte{1});
      EXPECT_GT(moved, 0);
      EXPECT_LT(moved, 64 * 8);
      const auto entries = bench.journal.entries();
      EXPECT_EQ(entries.size() - before, static_cast<std::size_t>(moved) / 64 + 1);
      EXPECT_EQ(entries.back().what, "tag");
      EXPECT_EQ(entries.back().code, Code::kSystem);
    }
  }
}

TEST(FaultChannel, ALostCompletionRunsUntilItIsCancelled) {
  for (const double delay : {0.0, 0.0005}) {
    FaultOptions options = slow(delay);
    options.completion_loss = 1;
    Bench bench(options);
    std::vector<std::byte> source(1000, std::byte{1});
    PlainMemory target(std::vector<std::byte>(1000));
    TestOperation& put = bench.make_put(source, target, "tag");
    TestOperation& empty = bench.make();
    bench.channel->post(put);
    bench.channel->post(empty);
    const std::int64_t patience = now_ns() + 10'000'000'000;
    while (bench.journal.of("copy").size() < 16 && now_ns() < patience) std::this_thread::yield();
    EXPECT_EQ(target.bytes, source);
    EXPECT_FALSE(bench.engine.wait(put, 0.05));
    EXPECT_TRUE(bench.journal.of("tag").empty());
    bench.channel->help(put, now_ns() + 1'000'000);
    EXPECT_EQ(empty.ends, 0);
    bench.cancel(put);
    EXPECT_EQ(put.code(), Code::kCancelled);
    ASSERT_EQ(bench.journal.of("tag").size(), 1u);
    EXPECT_EQ(bench.journal.of("tag")[0].code, Code::kCancelled);
    bench.cancel(put);  // Once more does nothing.
    bench.cancel(empty);
    EXPECT_EQ(empty.code(), Code::kCancelled);
  }
}

TEST(FaultChannel, WhatWasFailedBeforeItIsPostedEndsAtOnceAndMovesNothing) {
  FaultOptions options = slow(100);
  options.completion_loss = 1;
  Bench bench(options);
  std::vector<std::byte> source(1000);
  PlainMemory target(source);
  TestOperation& operation = bench.make_put(source, target, "tag");
  operation.fail(Status(Code::kCancelled, "early"));
  bench.channel->post(operation);
  EXPECT_EQ(operation.ends, 1);
  EXPECT_EQ(operation.code(), Code::kCancelled);
  EXPECT_TRUE(bench.journal.of("copy").empty());
}

TEST(FaultChannel, ACancelEndsWhatIsDelayedAndWhatTheInnerChannelHas) {
  std::vector<std::byte> source(64 * 8, std::byte{1});
  PlainMemory target(std::vector<std::byte>(source.size()));
  {
    Bench bench(slow(100));
    TestOperation& operation = bench.make_put(source, target, "tag");
    bench.channel->post(operation);
    bench.cancel(operation);
    EXPECT_EQ(operation.ends, 1);
    EXPECT_EQ(operation.code(), Code::kCancelled);
    EXPECT_EQ(bench.journal.of("tag").at(0).code, Code::kCancelled);
  }
  {
    Bench bench(slow(0), Pace::kWhenTold);
    TestOperation& operation = bench.make_put(source, target, "tag");
    bench.channel->post(operation);
    bench.cancel(operation);
    EXPECT_EQ(operation.ends, 1);
    EXPECT_TRUE(bench.journal.of("copy").empty());
    EXPECT_EQ(bench.journal.of("tag").at(0).code, Code::kCancelled);
  }
}

TEST(FaultChannel, CancelsAtEveryMomentGiveOneEnd) {
  test::Random random(9);
  KVZC_TRACE_SEED(random);
  FaultOptions options = slow(0.0004);
  options.completion_loss = 0.3;
  options.stripe_failure = 0.2;
  Bench bench(options);
  std::vector<std::byte> source(64 * 20, std::byte{1});
  PlainMemory target(std::vector<std::byte>(source.size()));
  for (int round = 0; round < 300; ++round) {
    TestOperation& operation = bench.make_put(source, target, "tag");
    std::thread canceller([&, pause_us = random.between(0, 600)] {
      pause(static_cast<double>(pause_us) * 1e-6);
      operation.fail(Status(Code::kCancelled, "cancelled"));
      if (Channel* channel = operation.channel.load()) channel->abort(operation);
    });
    bench.channel->post(operation);
    ASSERT_TRUE(bench.engine.wait(operation)) << "round " << round;
    const std::size_t copied = bench.journal.of("copy").size();
    canceller.join();
    pause(0.0002);
    EXPECT_EQ(bench.journal.of("copy").size(), copied);  // Nothing moves after the end.
  }
  EXPECT_EQ(bench.journal.of("tag").size(), 300u);
}

TEST(FaultChannel, WhenTheInnerChannelFailsAStripeTheRestIsPassedOver) {
  std::vector<std::byte> source(64 * 8);
  PlainMemory target(source);
  for (const Pace pace : {Pace::kAtOnce, Pace::kWhenTold}) {
    for (const double delay : {0.0, 0.001}) {
      FaultOptions options = slow(delay);
      options.completion_loss = 1;  // Of those that go well.
      Bench bench(options, pace);
      bench.plain->refusal = Status(Code::kRevoked, "revoked");
      TestOperation& operation = bench.make_put(source, target, "tag");
      bench.channel->post(operation);
      const std::int64_t patience = now_ns() + 10'000'000'000;
      while (operation.ends == 0 && now_ns() < patience) bench.plain->run_all();
      ASSERT_TRUE(bench.engine.wait(operation));
      EXPECT_EQ(operation.code(), Code::kRevoked);
      EXPECT_EQ(bench.journal.of("tag").at(0).code, Code::kRevoked);
    }
  }
}

TEST(FaultChannel, ATagWithoutDataIsDelayedAndGoesOutBeforeTheChannelIsLost) {
  Tag tag;
  tag.nbytes = 1;
  tag.bytes[0] = std::byte{'x'};
  {
    Bench bench(slow(0.001));
    bench.channel->send_tag(tag, Code::kCancelled);
    const std::int64_t patience = now_ns() + 10'000'000'000;
    while (bench.journal.of("tag").empty() && now_ns() < patience) std::this_thread::yield();
    EXPECT_EQ(bench.journal.of("tag").at(0).code, Code::kCancelled);
  }
  {
    Bench bench(slow(100));
    bench.channel->send_tag(tag, Code::kOk);
    EXPECT_TRUE(bench.journal.of("tag").empty());
    bench.channel->lose(Status(Code::kClosed, "bye"), PeerFate::kUnknown);
    EXPECT_EQ(bench.journal.of("tag").size(), 1u);
  }
}

// ---- Loss, silence, the end ----

TEST(FaultChannel, LosingEndsAllThatIsHeldBackAndAllThatComesAfter) {
  for (const Pace pace : {Pace::kAtOnce, Pace::kWhenTold}) {
    for (const double delay : {0.0, 100.0}) {
      FaultOptions options = slow(delay);
      options.completion_loss = 1;
      Bench bench(options, pace);
      std::vector<std::byte> source(64 * 8);
      PlainMemory target(source);
      for (int i = 0; i < 5; ++i) bench.channel->post(bench.make_put(source, target, "tag"));
      bench.channel->post(bench.make());
      for (const auto& each : bench.operations) EXPECT_EQ(each->ends, 0);
      bench.channel->lose(Status(Code::kPeerLost, "gone"), PeerFate::kGone);
      bench.channel->lose(Status(Code::kClosed, "later"), PeerFate::kGone);
      bench.channel->post(bench.make());
      bench.channel->post(bench.make_put(source, target, "tag"));
      for (const auto& each : bench.operations) {
        EXPECT_EQ(each->ends, 1);
        EXPECT_EQ(each->code(), Code::kPeerLost);
      }
      EXPECT_TRUE(bench.journal.of("tag").empty());
    }
  }
}

TEST(FaultChannel, ASilentPeerMovesNothingAndIsReportedLost) {
  for (const double delay : {0.0, 0.0005}) {
    FaultOptions options = slow(delay);
    options.vanish_after_posts = 3;
    options.detection_seconds = 0.5;
    Bench bench(options);
    std::vector<std::byte> source(100, std::byte{1});
    PlainMemory target(std::vector<std::byte>(100));
    for (int i = 0; i < 3; ++i) {
      bench.channel->drain();
      EXPECT_EQ(bench.post_and_wait(bench.make_put(source, target, "tag")), Code::kOk);
    }
    EXPECT_EQ(bench.engine.arrivals, 3);
    const std::size_t before = bench.journal.entries().size();
    TestOperation& put = bench.make_put(source, target, "tag");
    TestOperation& notify = bench.make("alone");
    TestOperation& cancelled = bench.make_put(source, target, "tag");
    for (TestOperation* each : {&put, &notify, &cancelled}) bench.channel->post(*each);
    bench.channel->drain();
    bench.channel->send_tag(put.tag, Code::kOk);
    bench.cancel(cancelled);
    EXPECT_EQ(cancelled.code(), Code::kCancelled);
    EXPECT_FALSE(bench.engine.wait(put, 0.05));
    EXPECT_EQ(bench.engine.losses, 0);
    ASSERT_TRUE(bench.engine.wait(put));
    ASSERT_TRUE(bench.engine.wait(notify));
    EXPECT_EQ(put.code(), Code::kPeerLost);
    EXPECT_EQ(put.state.status().text(), "injected: the peer fell silent");
    EXPECT_EQ(notify.code(), Code::kPeerLost);
    EXPECT_EQ(bench.engine.losses, 1);
    EXPECT_EQ(bench.channel->lost().code(), Code::kPeerLost);
    EXPECT_EQ(bench.journal.entries().size(), before);
    EXPECT_EQ(bench.engine.arrivals, 3);
  }
}

TEST(FaultChannel, ASilentPeerIsFoundAlsoWhenNobodyPostsMore) {
  FaultOptions options;
  options.vanish_after_posts = 1;
  options.detection_seconds = 0.01;
  Bench bench(options);
  EXPECT_EQ(bench.post_and_wait(bench.make("tag")), Code::kOk);
  EXPECT_EQ(bench.journal.of("tag").size(), 1u);
  EXPECT_TRUE(bench.engine.wait_for_loss());
}

TEST(FaultChannel, ASilentPeerThatIsNeverFoundNeedsNoThread) {
  FaultOptions options;
  options.vanish_after_posts = 1;
  options.detection_seconds = kEver;
  Bench bench(options);
  EXPECT_EQ(threads_named_fault(0), 0);
  TestOperation& first = bench.make();
  TestOperation& second = bench.make("tag");
  EXPECT_EQ(bench.post_and_wait(first), Code::kOk);
  bench.channel->post(second);
  EXPECT_FALSE(bench.engine.wait(second, 0.05));
  bench.channel->lose(Status(Code::kClosed, "bye"), PeerFate::kUnknown);
  EXPECT_EQ(second.code(), Code::kClosed);
  EXPECT_EQ(bench.engine.losses, 0);
  EXPECT_TRUE(bench.journal.of("tag").empty());
}

TEST(FaultTransport, StopEndsWhatIsHeldBackAndThenTheInnerTransport) {
  FaultOptions options = slow(100);
  Bench bench(options);
  std::vector<std::byte> source(1000);
  PlainMemory target(source);
  TestOperation& operation = bench.make_put(source, target);
  bench.channel->post(operation);
  EXPECT_TRUE(bench.transport->stop(INT64_MAX));
  EXPECT_EQ(operation.ends, 1);
  EXPECT_EQ(operation.code(), Code::kClosed);
  EXPECT_EQ(threads_named_fault(0), 0);
  EXPECT_EQ(bench.journal.entries().back().what, "stop");
  // Nobody is left to delay it.
  EXPECT_EQ(bench.post_and_wait(bench.make_put(source, target)), Code::kOk);
}

TEST(FaultChannel, ItsDestructionEndsWhatItHolds) {
  FaultOptions options = slow(0.002);
  options.completion_loss = 0.5;
  for (int round = 0; round < 20; ++round) {
    options.seed = static_cast<std::uint64_t>(round);
    Bench bench(options);
    std::vector<std::byte> source(1000);
    PlainMemory target(source);
    Tag tag;
    for (int i = 0; i < 5; ++i) {
      bench.channel->post(bench.make_put(source, target));
      bench.channel->send_tag(tag, Code::kOk);
    }
    pause(0.0005);
    bench.channel.reset();
    for (const auto& each : bench.operations) EXPECT_EQ(each->ends, 1);
  }
}

TEST(FaultChannel, AllTroubleAtOnceWithLossInTheMiddleGivesOneEndEach) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    FaultOptions options = slow(0.001);
    options.seed = seed;
    options.post_failure = options.stripe_failure = options.completion_loss = 0.2;
    options.vanish_after_posts = seed % 2 == 0 ? 0 : 60;
    options.detection_seconds = 0.005;
    Bench bench(options, seed % 3 == 0 ? Pace::kWhenTold : Pace::kAtOnce);
    std::vector<std::byte> source(64 * 6);
    std::deque<PlainMemory> targets;
    std::vector<TestOperation*> all;
    for (int i = 0; i < 100; ++i) {
      targets.emplace_back(source);
      all.push_back(&bench.make_put(source, targets.back(), "tag"));
    }
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = t; i < all.size(); i += 2) {
          bench.channel->post(*all[i]);
          if (i % 5 == 0) bench.channel->help(*all[i], now_ns() + 1000);
          if (i % 7 == 0) bench.cancel(*all[i]);
        }
      });
    }
    threads.emplace_back([&] {
      pause(0.003);
      bench.channel->lose(Status(Code::kPeerLost, "gone"), PeerFate::kUnknown);
    });
    for (std::thread& thread : threads) thread.join();
    for (TestOperation* each : all) ASSERT_TRUE(bench.engine.wait(*each)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace kvzc::fault

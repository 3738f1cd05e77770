// What the walk of a put may cost, counted and not timed: memory, locks, looks at the clock.
//
// The linker puts the counters below between the library and what it calls (CMakeLists.txt). They
// count for the thread that counts, so that the engine's own threads do not disturb.
#include <pthread.h>
#include <time.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "base/clock.h"
#include "gtest/gtest.h"
#include "kvzc/engine.h"

namespace {

struct Counts {
  int allocations = 0;
  int locks = 0;
  int clock_looks = 0;
};
thread_local Counts counts;
// So many more succeed on this thread; negative: all.
thread_local int allocations_left = -1;

}  // namespace

extern "C" {
int __real_pthread_mutex_lock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  ++counts.locks;
  return __real_pthread_mutex_lock(mutex);
}
int __real_clock_gettime(clockid_t clock, timespec* now);
int __wrap_clock_gettime(clockid_t clock, timespec* now) {
  ++counts.clock_looks;
  return __real_clock_gettime(clock, now);
}
}

// Not inlined: where GCC sees one of a pair and not the other, it warns that they do not fit.
[[gnu::noinline]] void* operator new(std::size_t nbytes) {
  ++counts.allocations;
  const bool is_memory_out = allocations_left == 0;
  if (allocations_left > 0) --allocations_left;
  void* const memory = is_memory_out ? nullptr : std::malloc(nbytes);
  if (memory != nullptr) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace kvzc {
namespace {

constexpr std::int64_t kBytes = 4 << 20;
constexpr int kTimes = 64;
const Slice kEightBytes{0, 8, std::nullopt};

// Two engines of this process, joined; the memory between them is mapped.
class BudgetTest : public testing::Test {
 protected:
  static std::shared_ptr<Engine> make_engine(std::shared_ptr<SharedAllocator> allocator) {
    EngineOptions options;
    options.transports = {"shm"};
    options.allocator = std::move(allocator);
    return Engine::create(std::move(options)).take();
  }

  static TensorSpec spec_of(std::byte* data) {
    TensorSpec spec;
    spec.shape = {kBytes};
    spec.strides_bytes = {1};
    spec.data = spec.storage_data = data;
    spec.storage_nbytes = kBytes;
    return spec;
  }

  BudgetTest() {
    const TensorSpec shared = spec_of(memory_->data());
    region_ = owner_->register_memory({&shared, 1}).take();
    target_ = RemoteView::from_bytes(encode_handle(region_.handle().take()).take()).take();
    from_ = writer_->find_or_borrow(spec_of(source_.data())).take();
    const Transfer connected = writer_->connect(target_).take();
    EXPECT_TRUE(connected.wait(INT64_MAX).is_ok());
  }

  // Counts what this thread does in `kTimes` rounds of put + wait, after as many that make lists grow.
  Counts count_puts(const Slice& slice, const TransferOptions& options) {
    const Index part = slice;
    LocalView from = from_;
    from.view = index_view(from_.view, {&part, 1}).take();
    const RemoteView to = target_.index({&part, 1}).take();
    const TransferItem item{&from, &to};
    Counts used;
    for (int pass = 0; pass < 2; ++pass) {
      counts = {};
      for (int i = 0; i < kTimes; ++i) {
        const Transfer transfer = writer_->try_put({&item, 1}, options).take();
        EXPECT_TRUE(transfer.wait(INT64_MAX).is_ok());
        EXPECT_TRUE(transfer.status().is_ok());
      }
      used = counts;
      owner_->poll_arrivals(1000);
    }
    return used;
  }

  std::shared_ptr<SharedAllocator> allocator_ = std::make_shared<SharedAllocator>();
  std::shared_ptr<SharedAllocation> memory_ = allocator_->allocate(kBytes).take();
  std::vector<std::byte> source_ = std::vector<std::byte>(kBytes);
  std::shared_ptr<Engine> owner_ = make_engine(allocator_);
  std::shared_ptr<Engine> writer_ = make_engine(nullptr);
  Region region_;
  RemoteView target_;
  LocalView from_;
};

TEST_F(BudgetTest, TheCountersCount) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  counts = {};
  ::operator delete(::operator new(1));
  pthread_mutex_lock(&mutex);
  pthread_mutex_unlock(&mutex);
  (void)now_ns();
  const Counts own = counts;
  (void)owner_->stats();
  const Counts library = counts;
  EXPECT_EQ(own.allocations, 1);
  EXPECT_EQ(own.locks, 1);
  EXPECT_EQ(own.clock_looks, 1);
  EXPECT_GT(library.locks, own.locks) << "the library's locks are not counted";
}

TEST_F(BudgetTest, ASmallPutTakesNoMemoryNoLockAndOneLookAtTheClock) {
  const Counts used = count_puts(kEightBytes, {});
  EXPECT_EQ(used.allocations, 0);
  EXPECT_EQ(used.locks, 0);
  // Every sixteenth is timed, and looks twice.
  EXPECT_LE(used.clock_looks, kTimes + kTimes / 16);
}

TEST_F(BudgetTest, ATagTakesTwoShortLocks) {
  TransferOptions options;
  options.notify = "ready";
  const Counts used = count_puts(kEightBytes, options);
  EXPECT_EQ(used.allocations, 0);
  EXPECT_LE(used.locks, 2 * kTimes);
  EXPECT_LE(used.clock_looks, kTimes + kTimes / 16);
}

TEST_F(BudgetTest, ATagThatIsPolledTakesNoMoreThanTheListThatIsGiven) {
  TransferOptions options;
  options.notify = "ready";
  (void)count_puts(kEightBytes, options);  // The inbox has grown.
  const Index part = kEightBytes;
  LocalView from = from_;
  from.view = index_view(from_.view, {&part, 1}).take();
  const RemoteView to = target_.index({&part, 1}).take();
  const TransferItem item{&from, &to};
  for (int i = 0; i < kTimes; ++i) {
    ASSERT_TRUE(writer_->try_put({&item, 1}, options).is_ok());
    counts = {};
    const std::vector<Arrival> came = owner_->poll_arrivals(10);
    const Counts used = counts;
    ASSERT_EQ(came.size(), 1u);
    EXPECT_EQ(used.allocations, 1);
    EXPECT_EQ(used.clock_looks, 1);
  }
}

// Not a budget, but where memory can be made to run out.
TEST_F(BudgetTest, WithoutMemoryForAReasonTheTagComesWithTheCode) {
  const Index part = kEightBytes;
  LocalView from = from_;
  from.view = index_view(from_.view, {&part, 1}).take();
  Grant grant = owner_->grant(region_.view().take(), Access::kPut).take();
  const RemoteView granted =
      RemoteView::from_bytes(encode_handle(grant.handle().take()).take()).take();
  const RemoteView to = granted.index({&part, 1}).take();
  const TransferItem item{&from, &to};
  TransferOptions options;
  options.notify = "ready";
  const Transfer before = writer_->try_put({&item, 1}, options).take();
  ASSERT_TRUE(before.wait(INT64_MAX).is_ok());
  owner_->poll_arrivals(10);
  ASSERT_TRUE(grant.revoke(INT64_MAX, Force::kNo).is_ok());
  // The writer finds that out when it looks, and has a long reason to give.
  allocations_left = 0;
  Result<Transfer> transfer = writer_->try_put({&item, 1}, options);
  allocations_left = -1;
  ASSERT_TRUE(transfer.is_ok());
  EXPECT_EQ(transfer->status().code(), Code::kLimitExceeded);
  const std::vector<Arrival> came = owner_->poll_arrivals(10);
  ASSERT_EQ(came.size(), 1u);
  EXPECT_EQ(came[0].code, Code::kLimitExceeded);
}

// Each time one allocation later: what was accepted ends, and what was not leaves nothing behind.
TEST_F(BudgetTest, WhereverMemoryRunsOutAPutEndsOrIsRefused) {
  const Index parts[] = {Slice{0, kBytes, std::nullopt}, Slice{0, 100'000, 2}, kEightBytes};
  for (const Index& part : parts) {
    bool has_enough = false;
    for (int enough = 0; !has_enough; ++enough) {
      ASSERT_LT(enough, 1000);
      // Afresh, so that no list has grown.
      const std::shared_ptr<Engine> writer = make_engine(nullptr);
      const RemoteView target = RemoteView::from_bytes(encode_handle(region_.handle().take()).take()).take();
      ASSERT_TRUE(writer->connect(target).take().wait(INT64_MAX).is_ok());
      LocalView from = writer->find_or_borrow(spec_of(source_.data())).take();
      from.view = index_view(from.view, {&part, 1}).take();
      const RemoteView to = target.index({&part, 1}).take();
      const TransferItem item{&from, &to};
      TransferOptions options;
      options.notify = "ready";
      options.deadline_ns = now_ns() + 60'000'000'000;
      allocations_left = enough;
      Result<Transfer> transfer = writer->try_put({&item, 1}, options);
      has_enough = allocations_left > 0;
      allocations_left = -1;
      if (transfer.is_ok()) {
        ASSERT_TRUE(transfer->wait(now_ns() + 20'000'000'000).is_ok()) << enough;
        EXPECT_TRUE(transfer->status().is_ok() || transfer->status().code() == Code::kLimitExceeded);
      } else {
        EXPECT_EQ(transfer.status().code(), Code::kLimitExceeded) << transfer.status().to_string();
      }
      EXPECT_EQ(owner_->poll_arrivals(10).size(), transfer.is_ok() ? 1u : 0u) << enough;
      EXPECT_EQ(writer->stats().transfers_running, 0u) << enough;
      EXPECT_TRUE(writer->close(now_ns() + 5'000'000'000).is_ok()) << enough;
    }
  }
}

TEST_F(BudgetTest, APutOfManyRunsTakesNoMemoryOnceTheListsHaveGrown) {
  const Counts used = count_puts(Slice{0, 1000, 2}, {});
  EXPECT_EQ(used.allocations, 0);
}

}  // namespace
}  // namespace kvzc

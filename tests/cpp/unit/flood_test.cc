// Floods of strangers on the control sockets: what they cost is bounded, and others are served meanwhile.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <deque>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/tcp_socket.h"
#include "base/unix_socket.h"
#include "core/wire.h"
#include "kvzc/engine.h"
#include "unit/unit_support.h"

namespace kvzc {
namespace {

using test::Child;

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kEnoughNs = 20 * kSecond;
constexpr std::uint64_t kNbytes = 1 << 16;
constexpr const char* kSecret = "sixteen bytes or more";
// Half-open connections are at most 128; a peer that is served has a socket and its process.
constexpr int kMostFds = 128 + 32;
constexpr std::int64_t kMostBytes = 64 << 20;

std::int64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  long long all = 0, resident = 0;
  EXPECT_EQ(std::fscanf(file, "%lld %lld", &all, &resident), 2);
  std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

// Connects again and again, does one thing of each kind and then nothing more; keeps many open. Never
// comes back.
int flood(const EngineAddress& there, const HandleInfo& info) {
  test::Random random(static_cast<std::uint64_t>(getpid()));
  wire::Hello hello;
  hello.to = info.incarnation;
  hello.grant_id = info.grant_id;
  hello.engine_name = "a stranger";
  const auto header = [](std::uint16_t type, std::uint32_t nbytes) {
    ByteWriter out;
    out.u16(type);
    out.u16(0);
    out.u32(nbytes);
    return out.take();
  };
  std::deque<OwnedFd> open;
  for (unsigned what = 0;; ++what) {
    if (open.size() >= 300) open.pop_front();
    Result<OwnedFd> made = there.kind == AddressKind::kTcp ? begin_connect_tcp(there.text)
                                                           : connect_to(there.text);
    if (!made.is_ok()) {  // The queue of connections is full.
      usleep(100);
      continue;
    }
    const int fd = open.emplace_back(made.take()).get();
    if (there.kind == AddressKind::kTcp) {
      pollfd look{fd, POLLOUT, 0};
      (void)poll(&look, 1, 100);
    }
    std::vector<std::byte> bytes;
    std::vector<OwnedFd> fds;
    switch (what % 7) {
      case 0:
        continue;  // Says nothing.
      case 1:
        bytes = random.bytes(static_cast<std::size_t>(random.between(1, 300)));
        break;
      case 2:
        bytes = wire::encode(hello);  // And never proves anything.
        break;
      case 3:
        bytes = header(1, 0x7fffffff);
        break;
      case 4:
        // Nearly all of the largest message there may be.
        bytes = header(3, kMaxMessageBytes);
        bytes.resize(kMaxMessageBytes - 16);
        break;
      case 5:
        bytes = header(1, 3);
        break;
      default:
        bytes = wire::encode(hello);
        if (there.kind == AddressKind::kTcp) break;
        for (std::size_t i = 0; i < kMaxMessageFds; ++i) {
          fds.emplace_back(eventfd(0, EFD_CLOEXEC));
        }
    }
    if (there.kind == AddressKind::kUnix) {
      (void)send_message(fd, bytes, fds);
    } else {
      (void)::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }
}

std::shared_ptr<Engine> must_create(EngineOptions options) {
  options.transports = {"shm"};
  Result<std::shared_ptr<Engine>> made = Engine::create(std::move(options));
  EXPECT_TRUE(made.is_ok()) << made.status().to_string();
  return made.is_ok() ? made.take() : nullptr;
}

class Flood : public testing::TestWithParam<AddressKind> {
 protected:
  void SetUp() override {
    EngineOptions options;
    options.listen = "127.0.0.1:0";
    options.secret = kSecret;
    owner_ = must_create(options);
    memory_ = owner_->allocator().allocate(kNbytes).take();
    TensorSpec spec;
    spec.shape = {static_cast<std::int64_t>(kNbytes)};
    spec.strides_bytes = {1};
    spec.data = spec.storage_data = memory_->data();
    spec.storage_nbytes = kNbytes;
    region_ = owner_->register_memory({&spec, 1}).take();
    info_ = region_.handle().take();
  }

  // Puts with a tag, and gives how long it took until both sides knew.
  std::int64_t serve(Engine& writer, const RemoteView& remote, int number) {
    std::vector<std::byte> source(kNbytes, static_cast<std::byte>(number));
    TensorSpec spec;
    spec.shape = {static_cast<std::int64_t>(kNbytes)};
    spec.strides_bytes = {1};
    spec.data = spec.storage_data = source.data();
    spec.storage_nbytes = kNbytes;
    const Result<LocalView> local = writer.find_or_borrow(spec);
    const std::string tag = "served " + std::to_string(number);
    TransferOptions notify;
    notify.notify = tag;
    const TransferItem item{&*local, &remote};
    const std::int64_t start = now_ns();
    for (;;) {
      const Result<Transfer> transfer = writer.put({&item, 1}, notify, start + kEnoughNs);
      EXPECT_TRUE(transfer.is_ok()) << transfer.status().to_string();
      if (!transfer.is_ok()) break;
      EXPECT_TRUE(transfer->wait(start + kEnoughNs).is_ok());
      // Pushed out with the strangers before it was known: it may try again.
      if (transfer->status().code() == Code::kTimedOut && now_ns() < start + kEnoughNs) continue;
      EXPECT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
      break;
    }
    EXPECT_TRUE(owner_->wait_arrivals(tag, 1, nullptr, start + kEnoughNs).is_ok());
    EXPECT_EQ(memory_->data()[kNbytes - 1], static_cast<std::byte>(number));
    return now_ns() - start;
  }

  RemoteView remote() const {
    RemoteView out;
    out.view = info_.view;
    out.handle = std::make_shared<RemoteView::Shared>();
    out.handle->info = info_;
    return out;
  }

  std::shared_ptr<Engine> owner_;
  std::shared_ptr<SharedAllocation> memory_;
  Region region_;
  HandleInfo info_;
};

TEST_P(Flood, CostsABoundedAmountAndKeepsNobodyWaiting) {
  const auto there = std::find_if(info_.addresses.begin(), info_.addresses.end(),
                                  [](const EngineAddress& each) { return each.kind == GetParam(); });
  ASSERT_NE(there, info_.addresses.end());
  const std::shared_ptr<Engine> writer = must_create({});
  const RemoteView known = remote();
  serve(*writer, known, 0);
  const int fds = test::open_fds();
  std::int64_t settled = 0;
  {
    const Child one([&] { return flood(*there, info_); }, 100);
    const Child two([&] { return flood(*there, info_); }, 100);
    const std::int64_t start = now_ns();
    int number = 0, most_fds = 0;
    std::int64_t worst_ns = 0;
    while (now_ns() - start < 3 * kSecond) {
      worst_ns = std::max(worst_ns, serve(*writer, known, ++number % 200));
      most_fds = std::max(most_fds, test::open_fds());
      // Once as many are half open as may be, it grows no more.
      if (settled == 0 && now_ns() - start > kSecond) settled = resident_bytes();
    }
    EXPECT_GT(number, 10);
    EXPECT_LT(worst_ns, 5 * kSecond);
    EXPECT_LE(most_fds, fds + kMostFds);
    EXPECT_GT(most_fds, fds + 16) << "the flood has not come";
    if (!KVZC_SANITIZED) {
      EXPECT_LT(resident_bytes(), settled + kMostBytes);
    }
    // One that was not there before gets in too.
    const std::shared_ptr<Engine> late = must_create({});
    serve(*late, remote(), 201);
  }
  // They are gone, and nothing of them stays.
  const std::int64_t end = now_ns() + kEnoughNs;
  while (test::open_fds() > fds + 4 && now_ns() < end) usleep(10'000);
  EXPECT_LE(test::open_fds(), fds + 4);
  EXPECT_LE(owner_->stats().peers, 2u);
}

INSTANTIATE_TEST_SUITE_P(Sockets, Flood, testing::Values(AddressKind::kUnix, AddressKind::kTcp),
                         [](const auto& each) {
                           return each.param == AddressKind::kUnix ? "Unix" : "Tcp";
                         });

}  // namespace
}  // namespace kvzc

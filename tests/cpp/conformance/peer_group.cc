#include "conformance/peer_group.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/clock.h"
#include "base/gated_copy.h"
#include "base/process.h"
#include "base/tcp_socket.h"
#include "base/unix_socket.h"

namespace kvzc::conformance {
namespace {

constexpr int kPatienceMs = 30'000;
// More when a soak asks for many rounds.
unsigned group_seconds() { return 120u + static_cast<unsigned>(rounds(0)); }

// Of the group that runs; its processes inherit it.
MemoryKind tested_memory = MemoryKind::kSharable;
bool is_between_hosts = false;

std::pair<OwnedFd, OwnedFd> make_pair() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) abort();
  return {OwnedFd(fds[0]), OwnedFd(fds[1])};
}

pid_t start_process(const Sut& sut, OwnedFd socket, OwnedFd& other, const Role& role) {
  fflush(stdout);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  other.reset();
  alarm(group_seconds());  // A hang ends as a failure.
  {
    Party party(sut, std::move(socket));
    role(party);
  }
  fflush(stdout);
  _exit(::testing::Test::HasFailure() ? 1 : 0);
}

void expect_success(pid_t pid, const char* who) {
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  if (WIFEXITED(status)) {
    EXPECT_EQ(WEXITSTATUS(status), 0) << "the " << who << " failed";
  } else {
    ADD_FAILURE() << "the " << who << " died of signal " << WTERMSIG(status);
  }
}

}  // namespace

void Party::tell(const std::string& text) {
  // An empty packet would read as the end.
  const std::string packet = text + '\n';
  (void)send(socket_.get(), packet.data(), packet.size(), MSG_NOSIGNAL);
}

std::string Party::hear() {
  pollfd wait{socket_.get(), POLLIN, 0};
  static thread_local char buffer[1 << 16];
  if (poll(&wait, 1, kPatienceMs) == 1) {
    const ssize_t got = recv(socket_.get(), buffer, sizeof buffer, 0);
    if (got > 0) return std::string(buffer, static_cast<std::size_t>(got) - 1);
    ADD_FAILURE() << "the other party is gone";
  } else {
    ADD_FAILURE() << "the other party says nothing";
  }
  return "";
}

std::shared_ptr<Engine> Party::make_engine(const std::function<void(EngineOptions&)>& change) {
  EngineOptions options = sut_.options();
  if (change) change(options);
  Result<std::shared_ptr<Engine>> engine = Engine::create(std::move(options));
  if (!engine.is_ok()) {
    ADD_FAILURE() << engine.status().to_string();
    abort();
  }
  return engine.take();
}

void run_group(const Sut& sut, Mode mode, const Role& owner, const Role& writer) {
  tested_memory = sut.memory;
  is_between_hosts = sut.between_hosts;
  auto [first, second] = make_pair();
  if (mode == Mode::kThreads) {
    std::thread other([&sut, &writer, socket = std::move(second)]() mutable {
      Party party(sut, std::move(socket));
      writer(party);
    });
    {
      Party party(sut, std::move(first));
      owner(party);
    }
    other.join();
    return;
  }
  // Both are children: this process stays free of engines, so that it can fork again.
  OwnedFd keep_first(dup(first.get()));
  const pid_t owner_pid = start_process(sut, std::move(first), second, owner);
  const pid_t writer_pid = start_process(sut, std::move(second), keep_first, writer);
  keep_first.reset();
  first.reset();
  second.reset();
  expect_success(owner_pid, "owner");
  expect_success(writer_pid, "writer");
}

int rounds(int usual) {
#if defined(__SANITIZE_THREAD__)
  usual = (usual + 3) / 4;  // What looks at all bytes takes ten times as long.
#endif
  const char* wanted = std::getenv("KVZC_ROUNDS");
  return wanted == nullptr ? usual : std::atoi(wanted);
}

std::uint64_t large(std::uint64_t usual) {
  return std::getenv("KVZC_SOFTROCE") == nullptr ? usual : usual / 4;
}

std::vector<Case> all_cases() {
  std::vector<Case> out;
  for (const Sut& sut : all_suts()) {
#if defined(__SANITIZE_THREAD__)
    // Tags travel through two mappings of one memory, which ThreadSanitizer takes for two; on memory
    // that both threads see at one address it would miss their order.
    if (sut.memory == MemoryKind::kPrivate) {
      out.push_back({sut, Mode::kProcesses});
      continue;
    }
#endif
    out.push_back({sut, Mode::kThreads});
    out.push_back({sut, Mode::kProcesses});
  }
  return out;
}

std::vector<Case> process_cases() {
  std::vector<Case> out = all_cases();
  std::erase_if(out, [](const Case& each) { return each.mode == Mode::kThreads; });
  return out;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return info.param.sut.name + (info.param.mode == Mode::kThreads ? "_threads" : "_processes");
}

// --- Memory for tests ---

namespace {

std::string text_of(const Result<HandleInfo>& info) {
  if (!info.is_ok()) {
    ADD_FAILURE() << info.status().to_string();
    return "";
  }
  Result<std::vector<std::byte>> bytes = encode_handle(*info);
  return bytes.is_ok() ? handle_to_text(*bytes) : "";
}

}  // namespace

std::string OwnedMemory::handle_text() const { return text_of(region.handle()); }

std::string text_of(const Grant& grant) { return text_of(grant.handle()); }

namespace {

TensorSpec spec_of(std::byte* data, std::uint64_t nbytes) {
  TensorSpec spec;
  spec.dtype = DType::kUint8;
  spec.shape = {static_cast<std::int64_t>(nbytes)};
  spec.strides_bytes = {1};
  spec.data = spec.storage_data = data;
  spec.storage_nbytes = nbytes;
  return spec;
}

template <typename T>
T checked(Result<T> result) {
  if (!result.is_ok()) {
    ADD_FAILURE() << result.status().to_string();
    abort();
  }
  return result.take();
}

}  // namespace

MemoryKind memory_kind() { return tested_memory; }

bool can_hold_stopped_writers() { return memory_kind() == MemoryKind::kSharable && can_restart(); }

std::shared_ptr<TestMemory> allocate(Engine& engine, std::uint64_t nbytes) {
  if (memory_kind() == MemoryKind::kSharable) {
    const std::shared_ptr<SharedAllocation> shared = checked(engine.allocator().allocate(nbytes));
    return std::make_shared<TestMemory>(shared, shared->data(), nbytes);
  }
  const auto bytes = std::make_shared<std::vector<std::byte>>(nbytes);
  return std::make_shared<TestMemory>(bytes, bytes->data(), nbytes);
}

OwnedMemory make_memory(Engine& engine, std::uint64_t nbytes) {
  OwnedMemory out;
  out.allocation = allocate(engine, nbytes);
  TensorSpec spec = spec_of(out.data(), nbytes);
  spec.keep_alive = out.allocation;
  out.region = checked(engine.register_memory({&spec, 1}));
  return out;
}

LocalView view_of(Engine& engine, std::byte* data, std::uint64_t nbytes) {
  return checked(engine.find_or_borrow(spec_of(data, nbytes)));
}

RemoteView open_handle(const std::string& text) {
  RemoteView view = checked(RemoteView::from_text(text));
  if (!is_between_hosts) return view;
  HandleInfo info = view.handle->info;
  std::erase_if(info.addresses, [](const auto& each) { return each.kind == AddressKind::kUnix; });
  return handle_of(info);
}

RemoteView handle_of(const HandleInfo& info) {
  return checked(RemoteView::from_bytes(checked(encode_handle(info))));
}

RemoteView at_address(const RemoteView& view, const std::string& address) {
  HandleInfo info = view.handle->info;
  info.addresses = {{is_between_hosts ? AddressKind::kTcp : AddressKind::kUnix, address}};
  return handle_of(info);
}

TestListener listen_somewhere() {
  TestListener out;
  if (is_between_hosts) {
    out.socket = checked(listen_tcp("127.0.0.1:0"));
    out.address = local_address(out.socket.get());
  } else {
    static std::atomic<int> count{0};
    out.address = "kvzc-test/" + std::to_string(getpid()) + "/" + std::to_string(++count);
    out.socket = checked(listen_at(out.address));
  }
  return out;
}

ControlSocket TestListener::accept() const {
  return is_between_hosts ? ControlSocket(ControlSocket::Kind::kTcp, checked(accept_tcp(socket.get())))
                          : ControlSocket(ControlSocket::Kind::kUnix, checked(accept_from(socket.get())));
}

ControlSocket connect_as_engine(const RemoteView& handle) {
  const std::string& address = handle.handle->info.addresses[0].text;
  if (!is_between_hosts) return {ControlSocket::Kind::kUnix, checked(connect_to(address))};
  OwnedFd socket = checked(begin_connect_tcp(address));
  pollfd wait{socket.get(), POLLOUT, 0};
  poll(&wait, 1, 10'000);
  return {ControlSocket::Kind::kTcp, std::move(socket)};
}

LocalView slice(const LocalView& view, std::int64_t begin, std::int64_t end) {
  const Index index = Slice{begin, end, std::nullopt};
  return checked(view.index({&index, 1}));
}

RemoteView slice(const RemoteView& view, std::int64_t begin, std::int64_t end) {
  const Index index = Slice{begin, end, std::nullopt};
  return checked(view.index({&index, 1}));
}

std::byte pattern(std::uint64_t at, std::uint32_t seed) {
  const std::uint64_t mixed = (at + 1) * 0x9e3779b97f4a7c15u + seed * 0xbf58476d1ce4e5b9u;
  return static_cast<std::byte>(mixed >> 56);
}

void fill(std::byte* data, std::uint64_t nbytes, std::uint32_t seed) {
  for (std::uint64_t i = 0; i < nbytes; ++i) data[i] = pattern(i, seed);
}

std::int64_t first_difference(const std::byte* data, std::uint64_t nbytes, std::uint32_t seed) {
  for (std::uint64_t i = 0; i < nbytes; ++i) {
    if (data[i] != pattern(i, seed)) return static_cast<std::int64_t>(i);
  }
  return -1;
}

std::int64_t in_seconds(double seconds) {
  return now_ns() + static_cast<std::int64_t>(seconds * 1e9);
}

void stop(pid_t process) {
  kill(process, SIGSTOP);
  const std::string tasks = "/proc/" + std::to_string(process) + "/task";
  const auto is_stopped = [&] {
    for (const auto& task : std::filesystem::directory_iterator(tasks)) {
      const ThreadLook look = look_at_thread(process, std::stoi(task.path().filename()), -1);
      if (look.state != ThreadLook::State::kStopped) return false;
    }
    return true;
  };
  const std::int64_t patience = in_seconds(10);
  while (!is_stopped() && in_seconds(0) < patience) std::this_thread::yield();
}

Status put_until_answered(Engine& engine, const LocalView& source, const RemoteView& target) {
  const std::int64_t patience = in_seconds(is_between_hosts ? 5 : 0);
  for (;;) {
    const TransferItem item{&source, &target};
    const Result<Transfer> transfer = engine.put({&item, 1}, {}, in_seconds(30));
    Status status = transfer.status();
    if (status.is_ok()) status = transfer->wait(in_seconds(30));
    if (status.is_ok()) status = transfer->status();
    if (status.code() != Code::kPeerLost || in_seconds(0) > patience) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void put_and_wait(Engine& engine, const LocalView& source, const RemoteView& target,
                  std::optional<std::string_view> notify) {
  TransferOptions options;
  options.notify = notify;
  const TransferItem item{&source, &target};
  Result<Transfer> transfer = engine.put({&item, 1}, options, in_seconds(30));
  ASSERT_TRUE(transfer.is_ok()) << transfer.status().to_string();
  const Status waited = transfer->wait(in_seconds(30));
  ASSERT_TRUE(waited.is_ok()) << waited.to_string();
  ASSERT_TRUE(transfer->status().is_ok()) << transfer->status().to_string();
}

}  // namespace kvzc::conformance

// PeerGroup: the same test as two threads and as two processes.
//
// One party owns memory, the other writes into it. They talk over a socket pair, for handles and
// for "now it is your turn"; nothing else connects them but the engines under test.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "conformance/sut.h"
#include "core/control_socket.h"
#include "kvzc/engine.h"

namespace kvzc::conformance {

enum class Mode { kThreads, kProcesses };

class Party {
 public:
  Party(const Sut& sut, OwnedFd socket) : sut_(sut), socket_(std::move(socket)) {}

  void tell(const std::string& text);
  // Fails the test, with an empty text, when the other says nothing for 30 s or is gone.
  std::string hear();
  // Passes when both have got here.
  void meet() {
    tell("here");
    hear();
  }
  // Gives up the socket, as a death would.
  void hang_up() { socket_.reset(); }

  std::shared_ptr<Engine> make_engine(const std::function<void(EngineOptions&)>& change = {});

 private:
  const Sut& sut_;
  OwnedFd socket_;
};

using Role = std::function<void(Party&)>;

// Runs both, and fails the test when one fails, crashes or hangs.
void run_group(const Sut& sut, Mode mode, const Role& owner, const Role& writer);

// How often a test of many rounds repeats: KVZC_ROUNDS, or `usual`.
int rounds(int usual);

// How much a test moves that must take a while: less where the processor is emulated.
std::uint64_t large(std::uint64_t usual);

struct Case {
  Sut sut;
  Mode mode;
};

// How GoogleTest names it; without this it prints the bytes.
inline void PrintTo(const Case& each, std::ostream* out) {
  *out << each.sut.name << (each.mode == Mode::kThreads ? " threads" : " processes");
}

class Conformance : public ::testing::TestWithParam<Case> {
 protected:
  void run(const Role& owner, const Role& writer) {
    run_group(GetParam().sut, GetParam().mode, owner, writer);
  }
};

std::vector<Case> all_cases();
std::vector<Case> process_cases();
std::string case_name(const ::testing::TestParamInfo<Case>& info);

// Each promise's file ends with this line.
#define KVZC_CONFORMANCE(Suite)                                                          \
  INSTANTIATE_TEST_SUITE_P(, Suite, ::testing::ValuesIn(kvzc::conformance::all_cases()), \
                           kvzc::conformance::case_name)

// The same for a file whose tests kill or stop a party, which only a process can be: they are not
// instantiated as threads, so none passes without having run.
#define KVZC_CONFORMANCE_OF_PROCESSES(Suite)                                                 \
  INSTANTIATE_TEST_SUITE_P(, Suite, ::testing::ValuesIn(kvzc::conformance::process_cases()), \
                           kvzc::conformance::case_name)

// --- Memory for tests ---

// Zeroed memory of the kind that the system under test asks for.
class TestMemory {
 public:
  TestMemory(std::shared_ptr<void> owner, std::byte* data, std::uint64_t nbytes)
      : owner_(std::move(owner)), data_(data), nbytes_(nbytes) {}
  std::byte* data() const { return data_; }
  std::uint64_t nbytes() const { return nbytes_; }

 private:
  std::shared_ptr<void> owner_;
  std::byte* data_;
  std::uint64_t nbytes_;
};
std::shared_ptr<TestMemory> allocate(Engine& engine, std::uint64_t nbytes);
MemoryKind memory_kind();
// Says whether a writer that is stopped in the middle of a copy can be kept from going on.
bool can_hold_stopped_writers();

// Such memory with an engine's region over it: uint8, one axis.
struct OwnedMemory {
  std::shared_ptr<TestMemory> allocation;
  Region region;

  std::byte* data() const { return allocation->data(); }
  std::uint64_t nbytes() const { return allocation->nbytes(); }
  std::string handle_text() const;
};
OwnedMemory make_memory(Engine& engine, std::uint64_t nbytes);
// A grant's handle as text.
std::string text_of(const Grant& grant);

// A view of the writer's private memory: uint8, one axis. The memory must outlive its transfers.
LocalView view_of(Engine& engine, std::byte* data, std::uint64_t nbytes);
RemoteView open_handle(const std::string& text);
// A handle with other contents; it shares nothing with the one that it was made from.
RemoteView handle_of(const HandleInfo& info);
// The same handle, but its owner is looked for at another address.
RemoteView at_address(const RemoteView& view, const std::string& address);
// A socket that takes control connections of the kind that engines of this test make, at an address
// of this machine that nobody else uses. By itself it accepts nobody and says nothing.
struct TestListener {
  OwnedFd socket;
  std::string address;

  ControlSocket accept() const;
};
TestListener listen_somewhere();
// Where engines of this test find the owner of a handle.
ControlSocket connect_as_engine(const RemoteView& handle);
// The bytes [begin, end) of a one-axis view.
LocalView slice(const LocalView& view, std::int64_t begin, std::int64_t end);
RemoteView slice(const RemoteView& view, std::int64_t begin, std::int64_t end);

// Bytes that say where they are and in which round they were written.
std::byte pattern(std::uint64_t at, std::uint32_t seed);
void fill(std::byte* data, std::uint64_t nbytes, std::uint32_t seed);
// Gives the first position that differs, or -1.
std::int64_t first_difference(const std::byte* data, std::uint64_t nbytes, std::uint32_t seed);

std::int64_t in_seconds(double seconds);

// Stops a process (SIGSTOP) and returns when none of its threads runs.
void stop(pid_t process);

// Puts and waits; gives how that ended. Between hosts a peer that was lost is tried again after a
// moment only: until then it is PeerLost, and that is waited for.
Status put_until_answered(Engine& engine, const LocalView& source, const RemoteView& target);

// Puts and waits. Fails the test when either goes wrong.
void put_and_wait(Engine& engine, const LocalView& source, const RemoteView& target,
                  std::optional<std::string_view> notify = std::nullopt);

}  // namespace kvzc::conformance

// What the binding files share. Casts and the GIL live here; decisions live in the core.
#pragma once

#include <Python.h>

#ifdef Py_GIL_DISABLED
#error "kvzc is not for free-threaded CPython yet: build with the ordinary one (3.13, not 3.13t)"
#endif

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvzc/completion_queue.h"
#include "kvzc/engine.h"
#include "kvzc/plan.h"

namespace py = pybind11;

namespace kvzc::bindings {

// --- errors.cc ---

// One exception class per status code.
void bind_errors(py::module_& module);
// Raises what a status says. Requires: it is not ok, the GIL.
[[noreturn]] void raise(const Status& status);
// Gives the exception as an object, or None.
py::object error_object(const Status& status);
inline void check(const Status& status) {
  if (!status.is_ok()) raise(status);
}
template <typename T>
T take(Result<T> result) {
  if (!result.is_ok()) raise(result.status());
  return result.take();
}

// --- objects.cc ---

// Holds a Python object until the last copy is dropped, on whatever thread that is. Without the
// GIL, the object waits for the next call that has it: dropping never blocks.
KeepAlive keep_alive(py::object object);
// Lets go of objects that waited for the GIL.
void release_waiting_objects();

// While it lives, what the core lets go of on this thread waits: a transfer that is being accepted may
// end others, and their sources' finalizers must not run in its middle. Requires: the GIL.
class HoldBack {
 public:
  HoldBack();
  ~HoldBack();
  HoldBack(const HoldBack&) = delete;
  HoldBack& operator=(const HoldBack&) = delete;
};

// Lets the GIL go while it lives. pybind11's own cannot be used: a daemon thread that comes back
// from it while the interpreter ends is unwound by CPython, through a destructor, which aborts the
// process. Once end_of_interpreter() was called such a thread sleeps for ever instead.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};
// Says that from now on no other thread may come back, and waits, a second at most, for those that
// are about to. Thread: the one that ends the interpreter, with the GIL.
void end_of_interpreter();

// --- tensors.cc ---

// A tensor, array or buffer, described. Raises for what kvzc cannot move.
struct Described {
  TensorSpec spec;
  // Why nothing may be written there, as it follows "the memory"; null: it may.
  const char* read_only = nullptr;
};
Described describe(py::handle object);
// Memory that the caller names by its address.
struct RawMemory {
  std::uint64_t address = 0;
  std::uint64_t nbytes = 0;
  bool is_writable = false;
  py::object owner;
};
// Gives whether the object is something that describe() takes.
bool is_torch_tensor(py::handle object);
// Whether the object is an instance of a class of a module which the program has imported: kvzc
// itself imports neither torch nor NumPy to look at an object.
bool is_instance_of(py::handle object, const char* module_name, const char* class_name);
[[noreturn]] void refuse(Code code, const std::string& text);
// A torch tensor or a NumPy array in memory that local transports reach directly.
py::object make_empty(SharedAllocator& allocator, py::handle shape, py::handle dtype,
                      const std::string& device);

// --- dlpack.cc ---

bool is_dlpack_producer(py::handle object);
// Describes a tensor of any library. It is kept by DLPack's deleter, which is called with the GIL.
// Requires: is_dlpack_producer(). Raises what its library raises.
Described describe_dlpack(py::handle object);
// The same of what the C exchange API tells in nanoseconds, without keeping it alive; none where
// there is no such API, or it cannot say, or the tensor is not on the CPU.
std::optional<TensorSpec> glance_at(py::handle object);

// --- dtypes.cc ---

// Raise for what kvzc does not move.
DType torch_dtype(py::handle dtype);
DType numpy_dtype(py::handle dtype);
// Of a torch dtype, one of kvzc's names, or whatever NumPy makes a dtype of.
DType dtype_of(py::handle dtype);
std::optional<DType> buffer_dtype(const char* format, std::size_t item);

// --- indexing.cc ---

std::vector<Index> parse_index(py::handle key);
// The axes that permute() is given: integers, or one tuple or list of them.
std::vector<std::int64_t> parse_dims(const py::args& dims);

// Block ids. Copied, so that nobody changes them once they were checked; a contiguous array of int64
// without a look at its entries. Raises TypeError.
IndexList parse_ids(py::handle object);

// --- timeouts ---

// Gives the absolute deadline of a time-out in seconds; none is the default, infinity is never.
// Raises ValueError for NaN or negative numbers.
// Raises ValueError for what is no time-out. For where no clock is needed: a look at it takes as long
// as a small put.
void check_timeout(std::optional<double> timeout);
std::int64_t deadline_of(std::optional<double> timeout, double default_seconds);
// Seconds from now until a transfer is cancelled, as an absolute time; none is never.
std::int64_t cancel_deadline_of(std::optional<double> deadline);
// Calls `step(slice_deadline_ns)` without the GIL until it gives something else than kTimedOut or
// kWouldBlock, or the deadline passes; sees Ctrl-C in between.
Status wait_in_slices(std::int64_t deadline_ns, const std::function<Status(std::int64_t)>& step);

// --- What Python adds to the core's classes ---

inline constexpr double kDefaultTimeoutSeconds = 30.0;

struct PyEngine {
  std::shared_ptr<Engine> engine;
  double default_timeout = kDefaultTimeoutSeconds;
  bool is_traced = false;

  // Closing may wait a moment for copies; other threads of the program run on meanwhile. Thread:
  // any, with or without the GIL.
  ~PyEngine();
};

struct PyTransfer {
  std::shared_ptr<PyEngine> owner;
  Transfer transfer;
  py::object label;
};

// Where a transfer that comes back from a queue came from. Goes without the GIL too.
struct Origin {
  std::shared_ptr<PyEngine> owner;
  KeepAlive label;
};
std::shared_ptr<Origin> origin_of(const PyTransfer& transfer);

struct PyRegion {
  std::shared_ptr<PyEngine> owner;
  Region region;

  PyRegion(std::shared_ptr<PyEngine> engine, Region registered)
      : owner(std::move(engine)), region(std::move(registered)) {}
  PyRegion(const PyRegion&) = delete;
  PyRegion& operator=(const PyRegion&) = delete;
  // Collection never waits: the engine closes the region.
  ~PyRegion() { region.close_later(); }
};

struct PyLocalView : LocalView {
  std::shared_ptr<PyEngine> owner;
};

struct PyGrant {
  std::shared_ptr<PyEngine> owner;
  Grant grant;
};

// The whole of a handle, as it came; its slices are RemoteViews.
struct PyRemoteHandle : RemoteView {};

struct PyPeer {
  std::shared_ptr<PyEngine> owner;
  std::shared_ptr<const PeerInfo> info;
};

// The default engine, made at first use.
std::shared_ptr<PyEngine> default_engine();

// The inbox of one engine, or of whichever is the default one.
struct PyArrivals {
  std::shared_ptr<PyEngine> owner;  // Null: the default engine.
  std::shared_ptr<PyEngine> engine() const { return owner ? owner : default_engine(); }
};

// --- bind_memory.cc ---

std::unique_ptr<PyRegion> register_object(const std::shared_ptr<PyEngine>& owner,
                                          const py::object& object);

// --- bind_transfers.cc ---

// The keyword arguments of every put and get.
struct TransferArguments {
  const py::object& after;
  const std::optional<py::bytes>& notify;
  const py::object& label;
  const std::optional<double>& deadline;
  const std::optional<double>& accept_timeout;
  CompletionQueue* queue = nullptr;
};
using Queue = std::optional<CompletionQueue*>;
using Pairs = py::typing::Iterable<py::typing::Tuple<py::object, py::object>>;
using PyTransferPointer = std::unique_ptr<PyTransfer>;

// What a put reads, or a get writes: the view itself, or one that is made for it. Raises TypeError.
const LocalView& local_of(Engine& engine, Direction direction, py::handle local,
                          std::optional<LocalView>& made);
PyTransferPointer transfer(const std::shared_ptr<PyEngine>& owner, Direction direction,
                           py::handle local, const RemoteView& remote,
                           const TransferArguments& arguments);
// Pairs of (source, target): local and remote for a put, remote and local for a get.
PyTransferPointer transfer_many(const std::shared_ptr<PyEngine>& owner, Direction direction,
                                const Pairs& pairs, const TransferArguments& arguments);
PyTransferPointer move(const std::shared_ptr<PyEngine>& owner, const Plan& plan,
                       Direction direction, const Plan::Blocks& blocks,
                       const TransferArguments& arguments);
// Sends a tag to a handle's owner, or to a peer.
PyTransferPointer notify(const std::shared_ptr<PyEngine>& owner, const RemoteView& target,
                         const TransferArguments& arguments);
PyTransferPointer notify(const std::shared_ptr<PyEngine>& owner, const PeerInfo& target,
                         const TransferArguments& arguments);
// Waits in slices without the GIL. Raises TimedOut.
void wait_transfers(std::span<const Transfer> transfers, WaitFor what, std::int64_t deadline_ns);

// --- One function per file makes its part of the module ---

// Classes that signatures of other files name.
void declare_engine(py::module_& module);
void declare_transfers(py::module_& module);
void declare_queues(py::module_& module);
void declare_plans(py::module_& module);

void bind_tensors(py::module_& module);
void bind_memory(py::module_& module);
void bind_transfers(py::module_& module);
void bind_queues(py::module_& module);
void bind_plans(py::module_& module);
void bind_addresses(py::module_& module);
void bind_arrivals(py::module_& module);
void bind_engine(py::module_& module);

}  // namespace kvzc::bindings

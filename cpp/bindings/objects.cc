// Python objects that the core keeps alive, and waiting with the GIL let go.

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <thread>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

// Objects whose last holder let go without the GIL.
struct WaitingObjects {
  std::atomic<bool> has_some{false};  // So that a look costs no lock.
  std::mutex mutex;
  std::vector<PyObject*> objects;
};

// Never destroyed: threads of the core may still let go while the process exits.
WaitingObjects& waiting() {
  static auto* const objects = new WaitingObjects;
  return *objects;
}

int release_from_interpreter(void*) {
  release_waiting_objects();
  return 0;
}

// PyGILState_Check() would do, but says yes on every thread once there was a subinterpreter.
bool has_gil() {
#if PY_VERSION_HEX >= 0x030d0000
  PyThreadState* const current = PyThreadState_GetUnchecked();
#else
  PyThreadState* const current = _PyThreadState_UncheckedGet();
#endif
  return current != nullptr && current == PyGILState_GetThisThreadState();
}

thread_local int holders_back = 0;  // HoldBacks of this thread.

void let_go(void* object) {
  auto* const self = static_cast<PyObject*>(object);
  if (!Py_IsInitialized()) return;  // The interpreter is gone, and the object with it.
  if (holders_back == 0 && has_gil()) {
    Py_DECREF(self);
    return;
  }
  {
    std::lock_guard lock(waiting().mutex);
    waiting().objects.push_back(self);
    waiting().has_some.store(true, std::memory_order_release);
  }
  // The main thread does it soon. A full list of such calls is no loss: the next call of kvzc, or
  // the next object, does it too.
  Py_AddPendingCall(release_from_interpreter, nullptr);
}

constexpr std::int64_t kSliceNs = 50'000'000;

// Threads that are about to take the GIL again, and whether they still may.
struct Returning {
  std::atomic<int> threads{0};
  std::atomic<bool> is_over{false};
  std::thread::id last;  // Who may return all the same; set before is_over.
};

Returning& returning() {
  static auto* const state = new Returning;
  return *state;
}

std::int64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

PyEngine::~PyEngine() {
  if (!engine || !has_gil()) return;
  const GilRelease release;
  engine.reset();
}

GilRelease::~GilRelease() {
  Returning& state = returning();
  state.threads.fetch_add(1);
  if (state.is_over.load() && std::this_thread::get_id() != state.last) {
    state.threads.fetch_sub(1);
    for (;;) pause();
  }
  PyEval_RestoreThread(state_);
  state.threads.fetch_sub(1);
}

void end_of_interpreter() {
  Returning& state = returning();
  state.last = std::this_thread::get_id();
  state.is_over.store(true);
  const std::int64_t patience_ns = clock_ns() + 1'000'000'000;
  // The GIL goes round while this thread sleeps.
  while (state.threads.load() > 0 && clock_ns() < patience_ns) {
    PyThreadState* const mine = PyEval_SaveThread();
    usleep(500);
    PyEval_RestoreThread(mine);
  }
}

KeepAlive keep_alive(py::object object) { return KeepAlive(object.release().ptr(), let_go); }

HoldBack::HoldBack() { ++holders_back; }

HoldBack::~HoldBack() {
  if (--holders_back == 0) release_waiting_objects();
}

void release_waiting_objects() {
  if (!waiting().has_some.load(std::memory_order_acquire)) return;
  std::vector<PyObject*> objects;
  {
    std::lock_guard lock(waiting().mutex);
    objects.swap(waiting().objects);
    waiting().has_some.store(false, std::memory_order_release);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

void check_timeout(std::optional<double> timeout) {
  if (timeout && (std::isnan(*timeout) || *timeout < 0)) {
    throw py::value_error("a timeout is a number of seconds, 0 or more; math.inf waits for ever");
  }
}

std::int64_t deadline_of(std::optional<double> timeout, double default_seconds) {
  const double seconds = timeout.value_or(default_seconds);
  check_timeout(seconds);
  if (seconds > 3.0e9) return INT64_MAX;
  return clock_ns() + static_cast<std::int64_t>(seconds * 1e9);
}

std::int64_t cancel_deadline_of(std::optional<double> deadline) {
  if (!deadline) return INT64_MAX;
  if (std::isnan(*deadline) || *deadline < 0) {
    throw py::value_error("deadline= is a number of seconds from now, 0 or more");
  }
  return deadline_of(deadline, 0);
}

Status wait_in_slices(std::int64_t deadline_ns, const std::function<Status(std::int64_t)>& step) {
  for (;;) {
    Status status;
    {
      const GilRelease release;
      status = step(std::min(deadline_ns, clock_ns() + kSliceNs));
    }
    if (status.code() != Code::kTimedOut && status.code() != Code::kWouldBlock) return status;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (clock_ns() >= deadline_ns) return status;
  }
}

}  // namespace kvzc::bindings

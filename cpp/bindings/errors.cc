// One exception class per status code, each also the built-in that a Python programmer would catch.

#include <array>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

// Filled once when the module is made; the classes live as long as the interpreter.
std::array<PyObject*, kCodeCount> exception_classes{};

// What it means, and what helps. docs/errors.md is made of these.
const char* doc_of(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "An argument that no call of this kind can take.\n\n"
             "The text says what was given and what is allowed.";
    case Code::kOutOfRange:
      return "An index, a block or an address beyond what there is.\n\n"
             "The text names the first one that is wrong, and the range.";
    case Code::kLayoutMismatch:
      return "Source and target differ in shape or dtype.\n\n"
             "Index both alike, or view(dtype) one of them: nothing is broadcast or converted.";
    case Code::kBadHandle:
      return "A handle or catalog that is truncated, damaged, forged or of a later version.\n\n"
             "Pass on exactly what to_bytes() or to_text() gave, and use one kvzc on both sides.";
    case Code::kNotRegistered:
      return "Memory outside every region, in a strict engine; or a grant of memory that is in no open region.\n\n"
             "Register its storage first.";
    case Code::kStaleHandle:
      return "A handle from an earlier life of its engine, which has restarted.\n\n"
             "Ask the owner for a fresh handle.";
    case Code::kRevoked:
      return "A grant that its owner has taken back, or whose region is closed. Not one more byte of the transfer lands.\n\n"
             "Ask the owner for a new handle, or drop the request: it was probably aborted there.";
    case Code::kAccessDenied:
      return "A user, a secret or an access that the owner does not allow.\n\n"
             "Have the owner grant it: access=, allow_users=, the same secret= on both sides.";
    case Code::kTimedOut:
      return "Not done in time. What was started goes on; what was not accepted was not posted.\n\n"
             "Wait again, cancel() it, or give more time.";
    case Code::kWouldBlock:
      return "A full queue or inbox, and accept_timeout=0. Nothing was posted.\n\n"
             "Take what has ended or arrived, or let the call wait.";
    case Code::kPeerLost:
      return "The peer's process, engine or host is gone, or no way to it is left.\n\n"
             "Continue with another peer; a transfer's memory is free once .quiet is true.";
    case Code::kCancelled:
      return "A transfer that was cancelled, by cancel() or its deadline. Not one more byte of it lands.\n\n"
             "None is needed: somebody asked for it.";
    case Code::kClosed:
      return "Use of an engine, region or queue that was closed.\n\n"
             "Make another one.";
    case Code::kTransportUnavailable:
      return "No transport that was asked for reaches the memory or the device.\n\n"
             "The text says why, and what would help; `kvzc info` lists what this machine can do.";
    case Code::kUnsupported:
      return "Something that this version does not do.\n\n"
             "The text names what is done instead.";
    case Code::kLimitExceeded:
      return "A limit of the machine: memory, locked memory, descriptors, threads, /dev/shm.\n\n"
             "The text says what was asked, what is allowed and how to raise it.";
    case Code::kForkedEngine:
      return "Use of an engine or queue that belongs to the parent process.\n\n"
             "Make another one in the child, or start processes by spawn.";
    case Code::kProtocol:
      return "A peer that does not keep the protocol: another version, or not kvzc at all.\n\n"
             "Use one kvzc on both sides; see who listens at the address.";
    case Code::kSystem:
      return "A system call that failed for an unexpected reason.\n\n"
             "The text names the call's purpose and the system's word for it.";
    case Code::kOk:
      break;
  }
  return "";
}

}  // namespace

void bind_errors(py::module_& module) {
  const auto make = [&](const char* name, const char* doc, const py::tuple& bases) {
    PyObject* made =
        PyErr_NewExceptionWithDoc((std::string("kvzc.") + name).c_str(), doc, bases.ptr(), nullptr);
    if (made == nullptr) throw py::error_already_set();
    module.add_object(name, py::reinterpret_borrow<py::object>(made));
    return made;
  };
  PyObject* base = make("Error", "The base of everything that kvzc raises.",
                        py::make_tuple(py::handle(PyExc_Exception)));
#define KVZC_EXCEPTION(code, name, builtin)                       \
  exception_classes[static_cast<std::size_t>(Code::code)] = make( \
      #name, doc_of(Code::code), py::make_tuple(py::handle(base), py::handle(PyExc_##builtin)));
  KVZC_STATUS_CODES(KVZC_EXCEPTION)
#undef KVZC_EXCEPTION
}

void raise(const Status& status) {
  PyErr_SetString(exception_classes[static_cast<std::size_t>(status.code())],
                  std::string(status.text()).c_str());
  throw py::error_already_set();
}

py::object error_object(const Status& status) {
  if (status.is_ok()) return py::none();
  const py::handle type(exception_classes[static_cast<std::size_t>(status.code())]);
  return type(std::string(status.text()));
}

}  // namespace kvzc::bindings

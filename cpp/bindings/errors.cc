// One exception class per status code, each also the built-in that a Python programmer would catch.

#include <array>

#include "bindings.h"

namespace kvzc::bindings {
namespace {

constexpr std::size_t kCodes = static_cast<std::size_t>(Code::kSystem) + 1;
// Filled once when the module is made; the classes live as long as the interpreter.
std::array<PyObject*, kCodes> exception_classes{};

const char* doc_of(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "An argument that no call of this kind can take.";
    case Code::kOutOfRange:
      return "An index beyond the shape.";
    case Code::kLayoutMismatch:
      return "Source and target differ in shape or dtype.";
    case Code::kBadHandle:
      return "A handle that is truncated, damaged, forged or too new.";
    case Code::kNotRegistered:
      return "Memory outside every region, in a strict engine.";
    case Code::kStaleHandle:
      return "A handle from an earlier life of its engine.";
    case Code::kRevoked:
      return "A grant that its owner has taken back.";
    case Code::kAccessDenied:
      return "A user or an access that the owner does not allow.";
    case Code::kTimedOut:
      return "Not done in time; what was started goes on.";
    case Code::kWouldBlock:
      return "A full queue or inbox; nothing was posted.";
    case Code::kPeerLost:
      return "The peer's process or engine is gone.";
    case Code::kCancelled:
      return "A transfer that was cancelled.";
    case Code::kClosed:
      return "Use of something that was closed.";
    case Code::kTransportUnavailable:
      return "No transport reaches the memory; the text says why.";
    case Code::kUnsupported:
      return "Something that this version does not do.";
    case Code::kLimitExceeded:
      return "A limit of the machine; the text says how to raise it.";
    case Code::kForkedEngine:
      return "Use of an engine that belongs to the parent process.";
    case Code::kProtocol:
      return "A peer that does not keep the protocol.";
    case Code::kSystem:
      return "A system call that failed for an unexpected reason.";
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

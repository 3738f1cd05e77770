#include "keywords.h"

#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>

namespace kvzc::bindings {
namespace {

constexpr Py_ssize_t kMostArguments = 16;

// Lives as long as the class or the module that it is of: for ever.
struct QuickFunction {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* function;
  PyObject* positional;
  PyObject* names;  // A tuple, interned.
  Py_ssize_t required;
  PyObject* weak_references;
};

QuickFunction& quick(PyObject* self) { return *reinterpret_cast<QuickFunction*>(self); }

PyObject* call(PyObject* self, PyObject* const* args, std::size_t given, PyObject* keywords) {
  const QuickFunction& own = quick(self);
  if (keywords == nullptr || PyVectorcall_NARGS(given) != own.required) {
    return PyObject_Vectorcall(own.function, args, given, keywords);
  }
  std::array<PyObject*, kMostArguments> all;
  std::copy_n(args, own.required, all.begin());
  const Py_ssize_t count = PyTuple_GET_SIZE(own.names);
  std::fill_n(all.begin() + own.required, count, Py_None);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keywords); ++i) {
    Py_ssize_t at = 0;
    while (at < count && PyTuple_GET_ITEM(own.names, at) != PyTuple_GET_ITEM(keywords, i)) ++at;
    if (at == count) return PyObject_Vectorcall(own.function, args, given, keywords);
    all[static_cast<std::size_t>(own.required + at)] = args[own.required + i];
  }
  return PyObject_Vectorcall(own.positional, all.data(),
                             static_cast<std::size_t>(own.required + count), nullptr);
}

PyObject* bind(PyObject* self, PyObject* instance, PyObject*) {
  if (instance == nullptr) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}
// Functions of a module are not bound, but `inspect` knows routines by being asked.
PyObject* do_not_bind(PyObject* self, PyObject*, PyObject*) { return Py_NewRef(self); }

// Its name, signature and all else are those of the function.
PyObject* get(PyObject* self, PyObject* name) {
  PyObject* const own = PyObject_GenericGetAttr(self, name);
  if (own != nullptr || PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return own;
  PyErr_Clear();
  return PyObject_GetAttr(quick(self).function, name);
}
PyObject* get_doc(PyObject* self, void*) {
  return PyObject_GetAttrString(quick(self).function, "__doc__");
}
// By its name, as other functions of a module.
PyObject* reduce(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(quick(self).function, "__name__");
}
PyObject* repr(PyObject* self) { return PyObject_Repr(quick(self).function); }

PyTypeObject* make_type(const char* name, bool is_method) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(QuickFunction, call), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(QuickFunction, weak_references), READONLY, nullptr},
      {}};
  static PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {}};
  static PyGetSetDef properties[] = {{"__doc__", get_doc, nullptr, nullptr, nullptr}, {}};
  PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                         {Py_tp_descr_get, reinterpret_cast<void*>(is_method ? bind : do_not_bind)},
                         {Py_tp_getattro, reinterpret_cast<void*>(get)},
                         {Py_tp_repr, reinterpret_cast<void*>(repr)},
                         {Py_tp_members, members},
                         {Py_tp_methods, methods},
                         {Py_tp_getset, properties},
                         {}};
  const unsigned long flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
                              Py_TPFLAGS_DISALLOW_INSTANTIATION |
                              (is_method ? Py_TPFLAGS_METHOD_DESCRIPTOR : 0);
  PyType_Spec spec = {name, sizeof(QuickFunction), 0, static_cast<unsigned>(flags), slots};
  auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw py::error_already_set();
  return type;
}

PyTypeObject* quick_type(bool is_method) {
  static PyTypeObject* const method = make_type("kvzc._core.method", true);
  static PyTypeObject* const function = make_type("kvzc._core.function", false);
  return is_method ? method : function;
}

// What is called itself, where a class would be given what binds it.
py::object unbound(const py::object& function) {
  if (PyInstanceMethod_Check(function.ptr()) == 0) return function;
  return py::reinterpret_borrow<py::object>(PyInstanceMethod_Function(function.ptr()));
}

}  // namespace

py::object with_quick_keywords(const py::object& function, const py::object& positional,
                               const std::vector<const char*>& names, std::size_t required) {
  if (required + names.size() > kMostArguments) {
    throw std::logic_error("a function of more arguments than are looked up quickly");
  }
  py::tuple interned(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    interned[i] = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(names[i]));
  }
  const bool is_method = PyInstanceMethod_Check(function.ptr()) != 0;
  QuickFunction* const made = PyObject_New(QuickFunction, quick_type(is_method));
  if (made == nullptr) throw py::error_already_set();
  made->call = call;
  made->function = unbound(function).release().ptr();
  made->positional = unbound(positional).release().ptr();
  made->names = interned.release().ptr();
  made->required = static_cast<Py_ssize_t>(required);
  made->weak_references = nullptr;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

}  // namespace kvzc::bindings

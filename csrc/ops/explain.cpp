// metalcore._C.explain: the registry of plan.h as seen from Python.
#include "explain_python.h"
#include "plan.h"

#include "common.h"

#include <memory>
#include <stdexcept>

namespace metalcore {

std::map<std::string_view, Explain>& explanations() {
  static std::map<std::string_view, Explain> registry;
  return registry;
}

namespace {

struct PythonError {};  // a Python exception is set

struct Unref {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Unref>;

Owned own(PyObject* object) {
  if (!object) throw PythonError{};
  return Owned(object);
}

std::string text(PyObject* object) {
  Owned bytes = own(PyUnicode_AsUTF8String(object));
  return PyBytes_AsString(bytes.get());
}

Request parse(PyObject* shapes, PyObject* dtype, PyObject* options) {
  Request request;
  for (Py_ssize_t i = 0, n = PySequence_Size(shapes); i < n; ++i) {
    Owned shape = own(PySequence_GetItem(shapes, i));
    std::vector<int64_t>& sizes = request.shapes.emplace_back();
    for (Py_ssize_t d = 0, dims = PySequence_Size(shape.get()); d < dims; ++d) {
      Owned size = own(PySequence_GetItem(shape.get(), d));
      sizes.push_back(PyLong_AsLongLong(size.get()));
      if (PyErr_Occurred()) throw PythonError{};
    }
  }
  request.dtype = dtype_named(text(dtype));
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(options, &at, &key, &value);) {
    Owned shown = own(PyObject_Str(value));
    request.options.emplace(text(key), text(shown.get()));
  }
  return request;
}

Owned dims(gpu::Size size) { return own(Py_BuildValue("(III)", size.x, size.y, size.z)); }

Owned to_python(const Explanation& explanation) {
  Owned steps = own(PyList_New(0));
  for (const Step& step : explanation.steps) {
    Owned item = own(Py_BuildValue("{s:s,s:N,s:N,s:O}", "kernel", step.kernel.c_str(), "grid", dims(step.grid).release(),
                                   "threadgroup", dims(step.threadgroup).release(), "threads",
                                   step.threads ? Py_True : Py_False));
    if (PyList_Append(steps.get(), item.get()) < 0) throw PythonError{};
  }
  return own(Py_BuildValue("{s:s,s:s,s:N}", "variant", explanation.variant.c_str(), "why", explanation.why.c_str(),
                           "steps", steps.release()));
}

}  // namespace

PyObject* explain_python(PyObject*, PyObject* args) {
  const char* op;
  PyObject *shapes, *dtype, *options;
  if (!PyArg_ParseTuple(args, "sOUO", &op, &shapes, &dtype, &options)) return nullptr;
  try {
    auto found = explanations().find(op);
    if (found == explanations().end()) {
      std::string known;
      for (const auto& [name, explain] : explanations()) known += (known.empty() ? "" : ", ") + std::string(name);
      throw std::invalid_argument("explain knows no op '" + std::string(op) + "'; it knows " + known);
    }
    return to_python(found->second(parse(shapes, dtype, options))).release();
  } catch (const PythonError&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
  return nullptr;
}

}  // namespace metalcore

// The registry of plan.h and the tuning table as seen from Python.
#include "explain_python.h"

#include "../gpu/tuning.h"
#include "common.h"
#include "plan.h"

#include <stdexcept>

namespace metalcore {

std::map<std::string_view, Explain>& explanations() {
  static std::map<std::string_view, Explain> registry;
  return registry;
}

namespace {

using python::Object;

Object own(PyObject* object) { return Object(python::check(object)); }

std::string text(PyObject* object) {
  Object bytes = own(PyUnicode_AsUTF8String(object));
  return PyBytes_AsString(bytes.get());
}

Request parse(PyObject* shapes, PyObject* dtype, PyObject* options, const char* device_type) {
  Request request;
  request.device_type = device_type;
  for (Py_ssize_t i = 0, n = PySequence_Size(shapes); i < n; ++i) {
    Object shape = own(PySequence_GetItem(shapes, i));
    std::vector<int64_t>& sizes = request.shapes.emplace_back();
    for (Py_ssize_t d = 0, dims = PySequence_Size(shape.get()); d < dims; ++d) {
      Object size = own(PySequence_GetItem(shape.get(), d));
      sizes.push_back(PyLong_AsLongLong(size.get()));
      if (PyErr_Occurred()) throw python::PythonError();
    }
  }
  request.dtype = dtype_named(text(dtype));
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(options, &at, &key, &value);) {
    Object shown = own(PyObject_Str(value));
    request.options.emplace(text(key), text(shown.get()));
  }
  return request;
}

Object dims(gpu::Size size) { return own(Py_BuildValue("(III)", size.x, size.y, size.z)); }

Object to_python(const Explanation& explanation) {
  Object steps = own(PyList_New(0));
  for (const Step& step : explanation.steps) {
    Object item = own(Py_BuildValue("{s:s,s:N,s:N,s:O}", "kernel", step.kernel.c_str(), "grid",
                                    dims(step.grid).release(), "threadgroup", dims(step.threadgroup).release(),
                                    "threads", step.threads ? Py_True : Py_False));
    if (PyList_Append(steps.get(), item.get()) < 0) throw python::PythonError();
  }
  return own(Py_BuildValue("{s:s,s:s,s:N}", "variant", explanation.variant.c_str(), "why", explanation.why.c_str(),
                           "steps", steps.release()));
}

// An op refuses arguments by a runtime_error, which here means a wrong value: ValueError.
template <typename Body>
PyObject* guarded(Body body) {
  return python::guarded([&] {
    try {
      return body().release();
    } catch (const std::runtime_error& error) {
      throw std::invalid_argument(error.what());
    }
  });
}

PyObject* explain_python(PyObject*, PyObject* args) {
  const char *op, *device_type;
  PyObject *shapes, *dtype, *options;
  if (!PyArg_ParseTuple(args, "sOUOs", &op, &shapes, &dtype, &options, &device_type)) return nullptr;
  return guarded([&] {
    auto found = explanations().find(op);
    if (found == explanations().end()) {
      std::string known;
      for (const auto& [name, explain] : explanations()) known += (known.empty() ? "" : ", ") + std::string(name);
      throw std::invalid_argument("explain knows no op '" + std::string(op) + "'; it knows " + known);
    }
    return to_python(found->second(parse(shapes, dtype, options, device_type)));
  });
}

PyObject* use_tuning_python(PyObject*, PyObject* family) {
  return guarded([&] {
    gpu::use_tuning(text(family));
    Py_INCREF(Py_None);
    return Object(Py_None);
  });
}

PyObject* chosen_tuning_python(PyObject*, PyObject*) { return PyUnicode_FromString(gpu::chosen_tuning()); }

PyObject* tuning_families_python(PyObject*, PyObject*) {
  return guarded([&] {
    Object families = own(PyList_New(0));
    for (const std::string& family : gpu::tuning_families()) {
      Object name = own(PyUnicode_FromString(family.c_str()));
      if (PyList_Append(families.get(), name.get()) < 0) throw python::PythonError();
    }
    return families;
  });
}

}  // namespace

PyMethodDef plan_methods[] = {
    {"explain", explain_python, METH_VARARGS,
     "explain(op, shapes, dtype, options, device_type) -> dict: how an op would run, and why"},
    {"use_tuning", use_tuning_python, METH_O, "use_tuning(family): plan as for this GPU family; '' for each GPU's own"},
    {"chosen_tuning", chosen_tuning_python, METH_NOARGS,
     "chosen_tuning() -> str: the family that use_tuning chose, or ''"},
    {"tuning_families", tuning_families_python, METH_NOARGS,
     "tuning_families() -> list: the families use_tuning takes"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace metalcore

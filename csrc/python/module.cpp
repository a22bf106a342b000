// The extension module metalcore._C. Loading it registers the ops with torch (static initializers in csrc/ops); the few
// functions that Python calls itself register themselves. Python's limited API only: one binary for Python 3.10 and
// later.
#include "objects.h"

#include <vector>

namespace metalcore::python {

namespace {

std::vector<PyMethodDef*>& registered() {
  static std::vector<PyMethodDef*> all;
  return all;
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "metalcore._C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

Methods::Methods(PyMethodDef* methods) { registered().push_back(methods); }

PyObject* make_module() {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return nullptr;
  for (PyMethodDef* methods : registered())
    if (PyModule_AddFunctions(module, methods) < 0) {
      Py_DECREF(module);
      return nullptr;
    }
  return module;
}

}  // namespace metalcore::python

PyMODINIT_FUNC PyInit__C() { return metalcore::python::make_module(); }

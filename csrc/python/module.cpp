// The extension module metalcore._C. Loading it registers the ops with torch (static initializers in csrc/ops); what
// Python itself calls are the few functions below. Python's limited API only: one binary for Python 3.10 and later.
#include "../ops/explain_python.h"

#ifdef METALCORE_MPS
#include "../backends/mps/python.h"
#endif
#ifdef METALCORE_SIMULATOR
#include "../backends/simulator/python.h"
#endif

namespace {

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "metalcore._C", nullptr, -1, metalcore::plan_methods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return nullptr;
#ifdef METALCORE_MPS
  if (PyModule_AddFunctions(module, metalcore::mps::python_methods) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
#endif
#ifdef METALCORE_SIMULATOR
  if (PyModule_AddFunctions(module, metalcore::simulator::python_methods) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
#endif
  return module;
}

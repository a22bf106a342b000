// The extension module metalcore._C. Loading it registers the ops with torch (static initializers in csrc/ops); Python
// itself calls the few functions below. They use Python's limited API only: one binary serves Python 3.10 and later.
#include "../ops/explain_python.h"

#ifdef METALCORE_CUDA
#include "../backends/cuda/python.h"
#endif
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

PyMethodDef* const backends[] = {
#ifdef METALCORE_CUDA
    metalcore::cuda::python_methods,
#endif
#ifdef METALCORE_MPS
    metalcore::mps::python_methods,
#endif
#ifdef METALCORE_SIMULATOR
    metalcore::simulator::python_methods,
#endif
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return nullptr;
  for (PyMethodDef* methods : backends)
    if (methods && PyModule_AddFunctions(module, methods) < 0) {
      Py_DECREF(module);
      return nullptr;
    }
  return module;
}

// Generated kernels as Python adds them.
#include "methods.h"

#include "../gpu/generated.h"

namespace metalcore::python {
namespace {

PyObject* add(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char *kernel, *source;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "ss#", &kernel, &source, &size)) throw PythonError();
    gpu::add_generated(kernel, {source, static_cast<size_t>(size)});
    Py_RETURN_NONE;
  });
}

PyMethodDef methods[] = {
    {"add_generated", add, METH_VARARGS,
     "add_generated(kernel, source): MSL with a kernel of this name, which recordings may then dispatch"},
    {nullptr, nullptr, 0, nullptr},
};
const Methods registered(methods);

}  // namespace
}  // namespace metalcore::python

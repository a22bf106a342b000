// PyTorch's operators whose kernels are in C++, as Python switches them: metalcore/overrides/_dispatcher.py.
#include "objects.h"

#include "../ops/linalg/cpu_route.h"
#include "../ops/common/replacement.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <exception>
#include <string>

namespace metalcore::python {
namespace {

PyObject* put(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char *name, *key;
    if (!PyArg_ParseTuple(args, "ss", &name, &key)) throw PythonError();
    replaced_operator(name).put(key);
    Py_RETURN_NONE;
  });
}

PyObject* take_out(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char *name, *key;
    if (!PyArg_ParseTuple(args, "ss", &name, &key)) throw PythonError();
    replaced_operator(name).take_out(key);
    Py_RETURN_NONE;
  });
}

PyObject* ran(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char *name, *device;
    if (!PyArg_ParseTuple(args, "ss", &name, &device)) throw PythonError();
    const bool cuda = std::string(device) == "cuda";
    return PyLong_FromLongLong(
        replaced_operator(name).ran(cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_mps()));
  });
}

PyObject* leave(PyObject*, PyObject* exception) {
  PyErr_SetObject(PyExceptionInstance_Class(exception), exception);
  leave_exception(std::make_exception_ptr(Raised::fetch()));
  Py_RETURN_NONE;
}

PyObject* on_cpu(PyObject*, PyObject*) { return PyLong_FromLongLong(calls_on_cpu()); }

PyObject* refused(PyObject*, PyObject*) { return PyBool_FromLong(left_as_refused()); }

PyMethodDef methods[] = {
    {"put_replacement", put, METH_VARARGS,
     "put_replacement(operator, key): puts the kernel for aten's operator at a dispatch key"},
    {"take_out_replacement", take_out, METH_VARARGS, "take_out_replacement(operator, key): takes it out again"},
    {"replacement_ran", ran, METH_VARARGS,
     "replacement_ran(operator, device_type) -> int: how often metalcore's op has run in the operator's place"},
    {"calls_on_cpu", on_cpu, METH_NOARGS,
     "calls_on_cpu() -> int: how often a plan of this thread has taken PyTorch's op on the CPU"},
    {"leave_exception", leave, METH_O,
     "leave_exception(exception): the kernel in C++ that called this thread's operator in Python raises it"},
    {"left_as_refused", refused, METH_NOARGS,
     "left_as_refused() -> bool: whether this thread's metalcore_replaced operator was called because the GPU refused "
     "a kernel; true once"},
    {nullptr, nullptr, 0, nullptr},
};
const Methods registered(methods);

}  // namespace
}  // namespace metalcore::python

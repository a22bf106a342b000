#include "gpu_family.h"

#import "pipelines.h"

#include "../../python/methods.h"

#import <Foundation/Foundation.h>

#include <stdexcept>
#include <string>

namespace metalcore::mps {
namespace {

using python::check;
using python::guarded;
using python::Object;
using python::PythonError;

PyObject* family(PyObject*, PyObject*) { return PyUnicode_FromString(gpu_family().c_str()); }

PyObject* kernels(PyObject*, PyObject*) {
  return guarded([] {
    Object list(check(PyList_New(0)));
    for (const std::string& name : kernel_names())
      if (PyList_Append(list.get(), Object(check(PyUnicode_FromString(name.c_str()))).get()) < 0) throw PythonError();
    return list.release();
  });
}

PyObject* compile(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    const char* name = nullptr;
    if (!PyArg_ParseTuple(arguments, "s", &name)) return nullptr;
    @autoreleasepool {
      id<MTLDevice> device = [MTLCreateSystemDefaultDevice() autorelease];
      if (!device) throw std::runtime_error("metalcore: this machine has no Metal device");
      const Pipeline& made = pipeline(device, name);
      return Py_BuildValue("{s:n,s:n}", "max_total_threads_per_threadgroup", static_cast<Py_ssize_t>(made.max_threads),
                           "static_threadgroup_memory_length", static_cast<Py_ssize_t>(made.static_memory));
    }
  });
}

PyMethodDef methods[] = {
    {"mps_gpu_family", family, METH_NOARGS, "The GPU's family, e.g. \"apple9\"; \"\" where there is none."},
    {"mps_kernels", kernels, METH_NOARGS, "The names of the built-in kernels."},
    {"mps_compile", compile, METH_VARARGS, "Makes a built-in kernel's pipeline, given its name; returns its limits."},
    {nullptr, nullptr, 0, nullptr},
};
const python::Methods registered(methods);

}  // namespace
}  // namespace metalcore::mps

#include "compiler.h"

#include "../../python/objects.h"

#include <stdexcept>

namespace metalcore::cuda {
namespace {

using python::Object;

python::Callback compiler;

Object to_python(const std::vector<Request>& requests) {
  Object list(python::check(PyList_New(0)));
  for (const Request& request : requests) {
    const Object entry(
        python::check(Py_BuildValue("(Iss)", request.program, request.kernel.c_str(), request.signature.c_str())));
    if (PyList_Append(list.get(), entry.get()) < 0) throw python::PythonError();
  }
  return list;
}

std::string to_text(PyObject* object) {
  const Object text(python::check(PyUnicode_AsUTF8String(object)));
  return PyBytes_AsString(text.get());
}

std::string to_bytes(PyObject* object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object, &data, &size) < 0) throw python::PythonError();
  return {data, static_cast<size_t>(size)};
}

std::vector<Compiled> from_python(PyObject* list, size_t count) {
  const Py_ssize_t given = python::length(list);
  if (given != static_cast<Py_ssize_t>(count))
    throw std::runtime_error("metalcore: the compiler of kernels returned " + std::to_string(given) + " results for " +
                             std::to_string(count) + " requests");
  std::vector<Compiled> compiled;
  for (Py_ssize_t i = 0; i < given; ++i) {
    const Object result = python::item(list, i);
    compiled.push_back({to_bytes(python::item(result.get(), 0).get()), to_text(python::item(result.get(), 1).get()),
                        to_text(python::item(result.get(), 2).get())});
  }
  return compiled;
}

}  // namespace

void set_compiler(PyObject* callable) { compiler.set(callable); }

std::vector<Compiled> compile(int arch, const std::vector<Request>& requests) {
  return compiler.call("metalcore: no compiler of CUDA kernels has been set", [&](PyObject* function) {
    const Object list = to_python(requests);
    const Object results(python::check(PyObject_CallFunction(function, "iO", arch, list.get())));
    return from_python(results.get(), requests.size());
  });
}

}  // namespace metalcore::cuda

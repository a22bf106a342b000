#include "compiler.h"

#include "../../python/objects.h"

namespace metalcore::simulator {
namespace {

python::Callback compiler;

}  // namespace

void set_compiler(PyObject* callable) { compiler.set(callable); }

std::string compile_kernel(std::string_view kernel, const std::string& family, bool checking, bool flushing) {
  return compiler.call("metalcore: no compiler of kernels has been set", [&](PyObject* function) {
    const python::Object path(python::check(PyObject_CallFunction(
        function, "s#zOO", kernel.data(), static_cast<Py_ssize_t>(kernel.size()),
        family.empty() ? nullptr : family.c_str(), checking ? Py_True : Py_False, flushing ? Py_True : Py_False)));
    const python::Object encoded(python::check(PyUnicode_EncodeFSDefault(path.get())));
    const char* text = PyBytes_AsString(encoded.get());
    if (!text) throw python::PythonError();
    return std::string(text);
  });
}

}  // namespace metalcore::simulator

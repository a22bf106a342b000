#import "device.h"
#import "pipelines.h"

#include "pipelines.h"

#include "../../python/objects.h"

#import <Foundation/Foundation.h>

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace metalcore::mps {

std::filesystem::path library_folder() {
  Dl_info here = {};
  if (!dladdr(reinterpret_cast<const void*>(&library_folder), &here) || !here.dli_fname)
    throw std::runtime_error("metalcore: cannot tell where the extension was loaded from");
  return std::filesystem::path(here.dli_fname).parent_path() / "lib";
}

void tell(const std::string& notice) { python::warn(notice); }

namespace {

using python::check;
using python::guarded;
using python::Object;
using python::PythonError;

PyObject* family(PyObject*, PyObject*) { return PyUnicode_FromString(gpu_family().c_str()); }

template <typename Map>
PyObject* as_dict(const Map& map) {
  return guarded([&] {
    Object dict(check(PyDict_New()));
    for (const auto& [key, value] : map) {
      const Object text(check(PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), "replace")));
      if (PyDict_SetItemString(dict.get(), key.c_str(), text.get()) < 0) throw PythonError();
    }
    return dict.release();
  });
}

PyObject* kernels(PyObject*, PyObject*) {
  return guarded([] { return as_dict(kernel_families()); });
}

PyObject* refused(PyObject*, PyObject*) {
  return guarded([] { return as_dict(refused_families()); });
}

template <typename Body>
void with_device(const Body& body) {
  id<MTLDevice> device = copy_device();
  if (!device) throw std::runtime_error("metalcore: this machine has no Metal device");
  try {
    body(device);
  } catch (...) {
    [device release];
    throw;
  }
  [device release];
}

struct AskHalfSubnormals {
  bool kept = false;

  void parse(PyObject*) {}
  void run() {
    with_device([this](id<MTLDevice> device) { kept = has_half_subnormals(device); });
  }
  PyObject* result() const { return PyBool_FromLong(kept); }
};

PyObject* half_subnormals(PyObject*, PyObject* arguments) {
  return python::parse_and_run<AskHalfSubnormals>(arguments);
}

struct Compile {
  std::vector<std::string> names;
  std::vector<const Pipeline*> made;

  void parse(PyObject* arguments) {
    for (Py_ssize_t i = 0; i < python::length(arguments); ++i) {
      const Object name = python::item(arguments, i);
      const Object utf8(check(PyUnicode_AsUTF8String(name.get())));
      names.emplace_back(check_bytes(PyBytes_AsString(utf8.get())));
    }
  }

  void run() {
    with_device([this](id<MTLDevice> device) { made = pipelines(device, {names.begin(), names.end()}); });
  }

  PyObject* result() const {
    Object dict(check(PyDict_New()));
    for (size_t i = 0; i < names.size(); ++i) {
      const Object limits(check(
          Py_BuildValue("{s:n,s:n}", "max_total_threads_per_threadgroup", static_cast<Py_ssize_t>(made[i]->max_threads),
                        "static_threadgroup_memory_length", static_cast<Py_ssize_t>(made[i]->static_memory))));
      if (PyDict_SetItemString(dict.get(), names[i].c_str(), limits.get()) < 0) throw PythonError();
    }
    return dict.release();
  }

 private:
  static const char* check_bytes(const char* text) {
    if (!text) throw PythonError();
    return text;
  }
};

PyObject* compile(PyObject*, PyObject* arguments) { return python::parse_and_run<Compile>(arguments); }

PyMethodDef methods[] = {
    {"mps_gpu_family", family, METH_NOARGS, "The GPU's family, e.g. \"apple9\"; \"\" where there is none."},
    {"mps_kernels", kernels, METH_NOARGS, "mps_kernels() -> dict: the built-in kernels' names, with their families"},
    {"mps_compile", compile, METH_VARARGS,
     "mps_compile(*names) -> dict: makes built-in kernels' pipelines, those of a family together; their limits"},
    {"mps_half_subnormals", half_subnormals, METH_VARARGS,
     "mps_half_subnormals() -> bool: whether the GPU keeps float16's subnormal numbers; if not, packed weights are "
     "decoded without them"},
    {"mps_refused", refused, METH_NOARGS,
     "mps_refused() -> dict: the families that Metal has refused, with its messages"},
    {nullptr, nullptr, 0, nullptr},
};
const python::Methods registered(methods);

}  // namespace
}  // namespace metalcore::mps

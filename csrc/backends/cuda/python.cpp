// What this backend has of Python and PyTorch: the current stream, the compiler of kernels, and the methods of _C.
#include "../../python/objects.h"
#include "driver.h"
#include "kernels.h"
#include "launches.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace metalcore::cuda {
namespace {

// libtorch_cuda.so is looked up, not linked: this PyTorch may be a build without CUDA.
using StreamGetter = int32_t (*)(int32_t device, void** stream);
StreamGetter find_stream_getter() {
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch ? reinterpret_cast<StreamGetter>(dlsym(torch, "aoti_torch_get_current_cuda_stream")) : nullptr;
}

}  // namespace

Stream current_stream(const Device& device) {
  static const StreamGetter getter = find_stream_getter();
  void* stream = nullptr;
  if (getter && getter(device.index, &stream) != 0)
    throw std::runtime_error("metalcore: PyTorch did not tell its current CUDA stream");
  return static_cast<Stream>(stream);
}

namespace {

using python::guarded;
using python::item;
using python::length;
using python::Object;
using python::PythonError;

python::Callback compiler;

Object to_python(const std::vector<Request>& requests) {
  Object list = python::own(PyList_New(0));
  for (const Request& request : requests)
    python::append(
        list, python::own(Py_BuildValue("(Iss)", request.program, request.kernel.c_str(), request.signature.c_str())));
  return list;
}

std::string to_text(PyObject* object) {
  const Object text = python::own(PyUnicode_AsUTF8String(object));
  return PyBytes_AsString(text.get());
}

std::string to_bytes(PyObject* object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object, &data, &size) < 0) throw PythonError();
  return {data, static_cast<size_t>(size)};
}

std::vector<Compiled> from_python(PyObject* list, size_t count) {
  const Py_ssize_t given = length(list);
  if (given != static_cast<Py_ssize_t>(count))
    throw std::runtime_error("metalcore: the compiler of kernels returned " + std::to_string(given) + " results for " +
                             std::to_string(count) + " requests");
  std::vector<Compiled> compiled;
  for (Py_ssize_t i = 0; i < given; ++i) {
    const Object result = item(list, i);
    compiled.push_back({to_bytes(item(result.get(), 0).get()), to_text(item(result.get(), 1).get()),
                        to_text(item(result.get(), 2).get())});
  }
  return compiled;
}

}  // namespace

std::vector<Compiled> compile(int arch, const std::vector<Request>& requests) {
  return compiler.call("metalcore: no compiler of CUDA kernels has been set", [&](PyObject* function) {
    const Object list = to_python(requests);
    const Object results = python::own(PyObject_CallFunction(function, "iO", arch, list.get()));
    return from_python(results.get(), requests.size());
  });
}

namespace {

PyObject* set_compiler(PyObject*, PyObject* callable) {
  return guarded([&]() -> PyObject* {
    compiler.set(callable);
    Py_RETURN_NONE;
  });
}

struct DispatchCall {
  int device_index = 0;
  Launches launches;

  void parse(PyObject* args) {
    unsigned int program;
    const char* name;
    PyObject *buffers, *lengths, *threads, *group;
    if (!PyArg_ParseTuple(args, "IsiOOOO", &program, &name, &device_index, &buffers, &lengths, &threads, &group))
      throw PythonError();
    launches.kernel(find_kernel(program, name));
    for (Py_ssize_t i = 0, count = length(buffers); i < count; ++i) {
      gpu::check_index(name, static_cast<uint32_t>(i));
      bind(static_cast<uint32_t>(i), item(buffers, i).get());
    }
    for (Py_ssize_t i = 0, count = length(lengths); i < count; ++i) {
      gpu::check_index(name, static_cast<uint32_t>(i));
      if (const uint32_t bytes = python::to_uint32(item(lengths, i).get()))
        launches.threadgroup_memory(static_cast<uint32_t>(i), bytes);
    }
    launches.dispatch(python::to_grid(threads, "threads"), python::to_grid(group, "group"));
  }

  void run() { launches.launch(device(device_index)); }

  PyObject* result() const { Py_RETURN_NONE; }

 private:
  void bind(uint32_t index, PyObject* value) {
    if (value == Py_None) return;
    if (PyBytes_Check(value)) {
      const auto size = static_cast<size_t>(length(value));
      gpu::check_bytes(launches.name(), index, size);
      std::memcpy(launches.bytes(index, size), PyBytes_AsString(value), size);
    } else if (PyList_Check(value)) {
      const auto count = static_cast<size_t>(length(value));
      gpu::check_pointers(launches.name(), index, count);
      auto* addresses = static_cast<void**>(launches.bytes(index, count * sizeof(void*)));
      for (size_t i = 0; i < count; ++i)
        addresses[i] = python::to_memory(item(value, static_cast<Py_ssize_t>(i)).get()).address;
    } else {
      launches.buffer(index, python::to_memory(value).address);
    }
  }
};

PyObject* dispatch(PyObject*, PyObject* args) { return python::parse_and_run<DispatchCall>(args); }

struct AttributesCall {
  int device_index = 0;
  Variant* variant = nullptr;
  const Loaded* loaded = nullptr;

  void parse(PyObject* args) {
    unsigned int program;
    const char *name, *layout;
    if (!PyArg_ParseTuple(args, "Issi", &program, &name, &layout, &device_index)) throw PythonError();
    variant = &find_kernel(program, name).variant(parse_layout(layout));
  }

  void run() {
    const Device& on = device(device_index);
    const CurrentContext context(on);
    loaded = variant->on[on.index].load(std::memory_order_acquire);
    if (!loaded) load(on, {variant});
    loaded = variant->on[on.index].load(std::memory_order_acquire);
  }

  PyObject* result() const {
    return Py_BuildValue("{s:I,s:I,s:I,s:I}", "max_threads", loaded->max_threads, "static_threadgroup_memory",
                         loaded->static_memory, "registers", loaded->registers, "local_bytes", loaded->local_memory);
  }
};

PyObject* attributes(PyObject*, PyObject* args) { return python::parse_and_run<AttributesCall>(args); }

Object describe_device(const Driver& d, int index) {
  DeviceNumber number = 0;
  char name[256] = "";
  size_t memory = 0;
  int major = 0, minor = 0, multiprocessors = 0;
  check(d.device(&number, index), "finding the GPU");
  check(d.device_name(name, sizeof name, number), "asking for a GPU's name");
  check(d.device_memory(&memory, number), "asking for a GPU's memory");
  check(d.device_attribute(&major, DeviceAttribute::kCapabilityMajor, number), "asking for a GPU's properties");
  check(d.device_attribute(&minor, DeviceAttribute::kCapabilityMinor, number), "asking for a GPU's properties");
  check(d.device_attribute(&multiprocessors, DeviceAttribute::kMultiprocessors, number),
        "asking for a GPU's properties");
  return Object(python::check(Py_BuildValue("{s:s,s:i,s:n,s:i}", "name", name, "arch", 10 * major + minor, "memory",
                                            static_cast<Py_ssize_t>(memory), "multiprocessors", multiprocessors)));
}

PyObject* info(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    int version = 0, count = 0;
    try {
      const Driver& d = driver();
      check(d.driver_version(&version), "asking for the driver's version");
      check(d.device_count(&count), "counting GPUs");
    } catch (const std::runtime_error& error) {
      return Py_BuildValue("{s:s}", "reason", error.what());
    }
    Object devices(python::check(PyList_New(0)));
    for (int i = 0; i < count; ++i)
      if (PyList_Append(devices.get(), describe_device(driver(), i).get()) < 0) throw PythonError();
    const std::string text = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    return Py_BuildValue("{s:s,s:O}", "driver", text.c_str(), "devices", devices.get());
  });
}

PyMethodDef methods[] = {
    {"cuda_set_compiler", set_compiler, METH_O,
     "cuda_set_compiler(compiler): what compiles kernels, or None. It is called from any thread as compiler(arch, "
     "[(program, kernel, signature), …]) and returns [(cubin or PTX, entry's name, source's name or \"\"), …]"},
    {"cuda_dispatch", dispatch, METH_VARARGS,
     "cuda_dispatch(program, kernel, device, buffers, threadgroup_lengths, threads, group): launches a kernel on "
     "PyTorch's current stream of the device. Each buffer is None, (address, nbytes), bytes or, for a table of "
     "addresses, a list of (address, nbytes); threads and group are three numbers each"},
    {"cuda_attributes", attributes, METH_VARARGS,
     "cuda_attributes(program, kernel, signature, device) -> dict: max_threads, static_threadgroup_memory, registers, "
     "local_bytes of the kernel with such bindings"},
    {"cuda_info", info, METH_NOARGS,
     "cuda_info() -> dict: the driver's CUDA version and its devices; or the reason why there is none. Makes no "
     "context, but processes forked afterwards cannot use CUDA"},
    {nullptr, nullptr, 0, nullptr},
};
const python::Methods registered(methods);

}  // namespace
}  // namespace metalcore::cuda

#include "../../python/objects.h"

#include "counted.h"
#include "interpreter.h"
#include "fault.h"
#include "launch.h"
#include "pool.h"
#include "modes.h"
#include "watch.h"

#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace metalcore::simulator {
namespace {

using python::check;
using python::guarded;
using python::item;
using python::length;
using python::Object;
using python::PythonError;
using python::to_memory;

PyObject* triple(msl_abi::Uint3 value) { return Py_BuildValue("(III)", value.x, value.y, value.z); }

// Raises metalcore.simulator.KernelError with what a Fault says.
void raise(const Fault& fault) {
  Object module(PyImport_ImportModule("metalcore.simulator.errors"));
  if (!module) return;
  Object make(PyObject_GetAttrString(module.get(), "from_fault"));
  if (!make) return;
  const msl_abi::Thread& t = fault.thread;
  Object error(PyObject_CallFunction(make.get(), "ssssINNN", fault.message().c_str(), fault.kind.c_str(),
                                     fault.kernel.c_str(), fault.file.c_str(), fault.line, triple(t.position_in_grid),
                                     triple(t.position_in_threadgroup), triple(t.threadgroup_position)));
  if (error) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
}

msl_abi::Uint3 to_size(PyObject* sequence, const char* what) {
  const gpu::Size size = python::to_grid(sequence, what);
  return {size.x, size.y, size.z};
}

struct PointerTable {
  std::vector<void*> addresses;
  std::vector<size_t> spans;
};

// The binding refers to objects that `kept` and `tables` hold.
Binding to_binding(PyObject* object, std::vector<Object>& kept, std::deque<PointerTable>& tables) {
  if (object == Py_None) return {};
  if (PyBytes_Check(object)) {
    const auto size = static_cast<size_t>(length(object));
    if (size > gpu::kMaximumBytes)
      throw std::invalid_argument("metalcore: " + std::to_string(size) + " bytes as an argument; Metal allows 4096");
    Py_INCREF(object);
    kept.emplace_back(object);
    return {Binding::kBytes, PyBytes_AsString(object), size, nullptr};
  }
  if (PyList_Check(object)) {
    PointerTable& table = tables.emplace_back();
    for (Py_ssize_t i = 0; i < length(object); ++i) {
      const auto [address, size] = to_memory(item(object, i).get());
      table.addresses.push_back(address);
      table.spans.push_back(size);
    }
    return {Binding::kPointers, table.addresses.data(), table.addresses.size() * sizeof(void*), table.spans.data()};
  }
  const auto [address, size] = to_memory(object);
  return {Binding::kBuffer, address, size, nullptr};
}

PyObject* load(PyObject*, PyObject* args) {
  return guarded([&] {
    PyObject* encoded = nullptr;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &encoded)) throw PythonError();
    Object path(encoded);
    const std::string name = PyBytes_AsString(path.get());
    note_end_of_python();
    return PyLong_FromUnsignedLong(load_library(name).id);
  });
}

PyObject* kernels(PyObject*, PyObject* args) {
  return guarded([&] {
    unsigned int id;
    if (!PyArg_ParseTuple(args, "I", &id)) throw PythonError();
    const msl_abi::Library& abi = *library(id).abi;
    Object list(check(PyList_New(0)));
    for (uint32_t k = 0; k < abi.kernel_count; ++k) {
      const msl_abi::Kernel& kernel = abi.kernels[k];
      Object arguments(check(PyList_New(0)));
      for (uint32_t a = 0; a < kernel.argument_count; ++a) {
        const msl_abi::Argument& argument = kernel.arguments[a];
        Object entry(check(Py_BuildValue("{s:s,s:s,s:I,s:I,s:N,s:N}", "name", argument.name, "kind",
                                         argument.kind == msl_abi::kThreadgroup ? "threadgroup" : "buffer", "index",
                                         argument.index, "element_size", argument.element_size, "writable",
                                         PyBool_FromLong(static_cast<long>(argument.writable)), "by_reference",
                                         PyBool_FromLong(static_cast<long>(argument.by_reference)))));
        if (PyList_Append(arguments.get(), entry.get()) < 0) throw PythonError();
      }
      Object entry(check(Py_BuildValue(
          "{s:s,s:N,s:I,s:O}", "name", kernel.name, "synchronizes",
          PyBool_FromLong((kernel.flags & msl_abi::kSynchronizes) != 0), "max_total_threads_per_threadgroup",
          kernel.max_total_threads ? kernel.max_total_threads : 1024, "arguments", arguments.get())));
      if (PyList_Append(list.get(), entry.get()) < 0) throw PythonError();
    }
    return list.release();
  });
}

struct Call {
  Launch launch = {};
  std::vector<Object> kept;
  std::deque<PointerTable> tables;
  std::optional<Fault> fault;
  std::optional<Interrupted> interrupted;

  void parse(PyObject* args) {
    unsigned int id;
    const char* name;
    PyObject *buffers, *lengths, *threads, *group;
    if (!PyArg_ParseTuple(args, "IsOOOO", &id, &name, &buffers, &lengths, &threads, &group)) throw PythonError();
    launch.kernel.library = &library(id);
    launch.kernel.kernel = launch.kernel.library->find(name);
    if (!launch.kernel.kernel)
      throw std::runtime_error(std::string("metalcore: the library has no kernel '") + name + "'");
    const Py_ssize_t count = length(buffers), length_count = length(lengths);
    if (count > kMaximumBuffers || length_count > kMaximumBuffers)
      throw std::invalid_argument("metalcore: arguments have indices up to 30");
    for (Py_ssize_t i = 0; i < count; ++i)
      launch.buffers[static_cast<size_t>(i)] = to_binding(item(buffers, i).get(), kept, tables);
    for (Py_ssize_t i = 0; i < length_count; ++i)
      launch.threadgroup_lengths[static_cast<size_t>(i)] = python::to_uint32(item(lengths, i).get());
    launch.threads = to_size(threads, "threads");
    launch.group = to_size(group, "group");
  }

  void run() {
    try {
      execute(launch);
    } catch (const Fault& found) {
      fault = found;
    } catch (const Interrupted& caught) {
      interrupted = caught;
    }
  }

  PyObject* result() const {
    if (fault) {
      raise(*fault);
      return nullptr;
    }
    if (interrupted) {
      interrupted->restore();
      return nullptr;
    }
    Py_RETURN_NONE;
  }
};

PyObject* dispatch(PyObject*, PyObject* args) { return python::parse_and_run<Call>(args); }

PyObject* set_path(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject* encoded = nullptr;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &encoded)) throw PythonError();
    Object path(encoded);
    set_library_path(PyBytes_AsString(path.get()));
    Py_RETURN_NONE;
  });
}

PyObject* set_compiler_python(PyObject*, PyObject* callable) {
  return guarded([&]() -> PyObject* {
    set_compiler(callable);
    Py_RETURN_NONE;
  });
}

PyObject* set_checking_python(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    int on, misaligned = 0;
    unsigned int seed = 0;
    if (!PyArg_ParseTuple(args, "p|Ip", &on, &seed, &misaligned)) throw PythonError();
    set_checking({on != 0, seed, misaligned != 0});
    Py_RETURN_NONE;
  });
}

PyObject* set_flushing_python(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    int on;
    if (!PyArg_ParseTuple(args, "p", &on)) throw PythonError();
    set_flushing(on != 0);
    Py_RETURN_NONE;
  });
}

PyObject* set_device_functions_python(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    unsigned long long find, range, rethrow;
    if (!PyArg_ParseTuple(args, "KKK", &find, &range, &rethrow)) throw PythonError();
    set_device_functions({reinterpret_cast<decltype(DeviceFunctions::find_allocation)>(find),
                          reinterpret_cast<decltype(DeviceFunctions::range_of_allocations)>(range),
                          reinterpret_cast<decltype(DeviceFunctions::rethrow)>(rethrow)});
    Py_RETURN_NONE;
  });
}

PyObject* checking_python(PyObject*, PyObject*) {
  return guarded([&] {
    const Checking now = checking();
    return Py_BuildValue("(NIN)", PyBool_FromLong(now.on), now.seed, PyBool_FromLong(now.misaligned));
  });
}

PyObject* set_counting_python(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject* compiler;
    unsigned long long events, whole;
    const char* family;
    unsigned int cores;
    if (!PyArg_ParseTuple(args, "OKKsI", &compiler, &events, &whole, &family, &cores)) throw PythonError();
    set_counting_compiler(compiler);
    set_counting({compiler != Py_None, events, whole, family, cores});
    Py_RETURN_NONE;
  });
}

PyObject* take_counts_python(PyObject*, PyObject*) {
  return guarded([&] {
    Object list(check(PyList_New(0)));
    const auto append = [](Object& to, PyObject* made) {
      const Object item(check(made));
      if (PyList_Append(to.get(), item.get()) < 0) throw PythonError();
    };
    static constexpr const char* kNames[] = {"device", "constant", "threadgroup", "thread"};
    for (const Counts& counts : take_counts()) {
      Object blocks(check(PyList_New(0))), sites(check(PyList_New(0))), buffers(check(PyList_New(0)));
      for (const auto& [number, block] : counts.blocks)
        append(blocks, Py_BuildValue("(IKKK)", number, block.simdgroups, block.lanes, block.parted));
      for (const auto& [number, places] : counts.sites)
        for (uint32_t place = 0; place < kPlaces; ++place)
          if (const Counts::Site& site = places[place]; site.simdgroups)
            append(sites, Py_BuildValue("{s:I,s:s,s:K,s:K,s:K,s:K,s:K,s:K,s:(KK)}", "site", number, "space",
                                        kNames[place], "simdgroups", site.simdgroups, "lanes", site.lanes, "bytes",
                                        site.bytes, "lines", site.lines, "sectors", site.sectors, "passes", site.passes,
                                        "missed", site.missed[0], site.missed[1]));
      for (const Counts::Buffer& buffer : counts.buffers)
        append(buffers, Py_BuildValue("{s:I,s:K,s:K,s:K,s:K,s:(ddd)}", "index", buffer.index, "bytes", buffer.bytes,
                                      "read", buffer.read, "written", buffer.written, "distinct", buffer.distinct,
                                      "shared", buffer.shared[0], buffer.shared[1], buffer.shared[2]));
      append(list,
             Py_BuildValue("{s:s,s:s,s:N,s:N,s:K,s:K,s:K,s:I,s:O,s:N,s:N,s:N}", "path", counts.path.c_str(), "kernel",
                           counts.kernel.c_str(), "threads", triple(counts.threads), "group", triple(counts.group),
                           "groups", counts.groups, "sampled", counts.sampled, "events", counts.events,
                           "threadgroup_memory", counts.threadgroup_memory, "ran", counts.ran ? Py_True : Py_False,
                           "blocks", blocks.release(), "sites", sites.release(), "buffers", buffers.release()));
    }
    return list.release();
  });
}

PyObject* set_threads(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    unsigned int count;
    if (!PyArg_ParseTuple(args, "I", &count)) throw PythonError();
    if (!count || count > 1024) throw std::invalid_argument("metalcore: the simulator runs on 1 to 1024 threads");
    set_num_threads(count);
    Py_RETURN_NONE;
  });
}

PyObject* set_timeout_python(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds)) throw PythonError();
    set_timeout(seconds);
    Py_RETURN_NONE;
  });
}

PyObject* info(PyObject*, PyObject*) {
  return guarded([&] {
    const Checking now = checking();
    return Py_BuildValue("{s:I,s:s,s:s,s:N,s:I,s:N,s:I,s:d}", "threads", num_threads(), "isa", builtin_isa().c_str(),
                         "library_path", library_path().c_str(), "checking", PyBool_FromLong(now.on), "seed", now.seed,
                         "flushing", PyBool_FromLong(flushes_subnormals()), "abi_version", msl_abi::kVersion, "timeout",
                         timeout());
  });
}

PyMethodDef methods[] = {
    {"simulator_load", load, METH_VARARGS,
     "simulator_load(path) -> int: opens a translated library and returns its number"},
    {"simulator_kernels", kernels, METH_VARARGS,
     "simulator_kernels(library) -> list of dicts: the kernels of a library and their arguments"},
    {"simulator_dispatch", dispatch, METH_VARARGS,
     "simulator_dispatch(library, kernel, buffers, threadgroup_lengths, threads, group): runs a kernel to its end. "
     "Each buffer is None, (address, nbytes), bytes or, for a table of addresses, a list of (address, nbytes); threads "
     "and group are three numbers each"},
    {"simulator_set_library_path", set_path, METH_VARARGS,
     "simulator_set_library_path(folder): where the built-in kernels' libraries are"},
    {"simulator_set_compiler", set_compiler_python, METH_O,
     "simulator_set_compiler(compiler): what compiles kernels, or None. It is called from any thread as "
     "compiler(kernel, "
     "family, checking, flushing), with family None for generated kernels, and returns the path of a translated "
     "library"},
    {"simulator_set_checking", set_checking_python, METH_VARARGS,
     "simulator_set_checking(on, seed=0, misaligned=False): switches checking mode of this process"},
    {"simulator_set_flushing", set_flushing_python, METH_VARARGS,
     "simulator_set_flushing(on): whether kernels take float32 subnormals for zero, at first METALCORE_FTZ"},
    {"simulator_checking", checking_python, METH_NOARGS, "simulator_checking() -> (on, seed, misaligned)"},
    {"simulator_set_device_functions", set_device_functions_python, METH_VARARGS,
     "simulator_set_device_functions(find_allocation, range_of_allocations, rethrow): addresses of the functions of "
     "launch.h's DeviceFunctions"},
    {"simulator_set_counting", set_counting_python, METH_VARARGS,
     "simulator_set_counting(compiler, events, whole, family, cores): counts what kernels do, until the compiler is "
     "None. It is called as compiler(kernel, family), with family None for generated kernels; a dispatch is counted "
     "for about as many events, and also runs as a whole where that has at most `whole`; plans are those of a family "
     "of GPUs with so many cores, or 0"},
    {"simulator_take_counts", take_counts_python, METH_NOARGS,
     "simulator_take_counts() -> list of dicts: what was counted since the last call, a dispatch each"},
    {"simulator_set_num_threads", set_threads, METH_VARARGS,
     "simulator_set_num_threads(count): how many threads a dispatch may use, the calling one included"},
    {"simulator_set_timeout", set_timeout_python, METH_VARARGS,
     "simulator_set_timeout(seconds): how long a dispatch may take, at first METALCORE_TIMEOUT; 0 for no limit"},
    {"simulator_info", info, METH_NOARGS,
     "simulator_info() -> dict: threads, isa, library_path, checking, seed, flushing, abi_version, timeout"},
    {nullptr, nullptr, 0, nullptr},
};
const python::Methods registered(methods);

}  // namespace
}  // namespace metalcore::simulator

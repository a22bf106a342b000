// The arguments of Python calls that dispatch kernels.
#pragma once

#include "objects.h"

#include "../gpu/size.h"

#include <cstddef>
#include <cstdint>

namespace metalcore::python {

inline Object item(PyObject* sequence, Py_ssize_t index) { return Object(check(PySequence_GetItem(sequence, index))); }

inline Py_ssize_t length(PyObject* sequence) {
  const Py_ssize_t size = PySequence_Size(sequence);
  if (size < 0) throw PythonError();
  return size;
}

uint32_t to_uint32(PyObject* object);
size_t to_size(PyObject* object);
gpu::Size to_grid(PyObject* sequence, const char* what);  // takes three numbers

// A buffer's address and size: (address, nbytes).
struct Memory {
  void* address;
  size_t size;
};
Memory to_memory(PyObject* object);

// Parses a call's arguments, runs it without the GIL and makes its result: Call has parse(arguments), run() and
// result(). Returns nullptr with a Python exception set where one of them throws.
//
// Python ends a thread that outlives the interpreter where the thread takes the GIL back. There must be no handler
// around that place, and no object whose destructor needs the GIL. So `pending` is a plain pointer.
template <typename Call>
PyObject* parse_and_run(PyObject* arguments) {
  struct Pending {
    Call call;
    std::exception_ptr failure;

    void run() {
      try {
        call.run();
      } catch (...) {
        failure = std::current_exception();
      }
    }
  };
  auto* pending = new Pending;
  const bool parsed = guarded([&]() -> PyObject* {
    pending->call.parse(arguments);
    return Py_True;
  });
  if (parsed) {
    PyThreadState* state = PyEval_SaveThread();
    pending->run();
    PyEval_RestoreThread(state);
  }
  PyObject* result = !parsed ? nullptr : guarded([&]() -> PyObject* {
    if (pending->failure) std::rethrow_exception(pending->failure);
    return pending->call.result();
  });
  delete pending;
  return result;
}

}  // namespace metalcore::python

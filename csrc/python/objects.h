// What C++ needs of Python: objects, exceptions, the arguments of calls, functions of the module and callbacks. It uses
// Python's limited API only.
#pragma once

#include "../gpu/limits.h"

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch {

// PyTorch's bindings know this class by its name, and raise an exception of its type in Python. It mirrors the one of
// torch/csrc/Exceptions.h, which is not part of the stable ABI: where a C++ runtime tells classes apart by other things
// than their names, Python sees a RuntimeError with the same message.
struct __attribute__((visibility("default"))) PyTorchError : std::exception {
  explicit PyTorchError(std::string text) : msg(std::move(text)) {}
  virtual PyObject* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};

}  // namespace torch

namespace metalcore::python {

// Owns a reference to an object.
class Object {
 public:
  explicit Object(PyObject* object = nullptr) : object_(object) {}
  ~Object() { Py_XDECREF(object_); }
  Object(Object&& other) noexcept : object_(other.release()) {}
  Object(const Object&) = delete;
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

struct PythonError {};  // thrown where Python's error indicator is set

inline PyObject* check(PyObject* object) {
  if (!object) throw PythonError();
  return object;
}
inline Object own(PyObject* object) { return Object(check(object)); }

inline void append(const Object& list, Object item) {
  if (PyList_Append(list.get(), item.get()) < 0) throw PythonError();
}

// A Python exception on its way through C++ code, PyTorch's included, which may not hold the GIL; what() is its
// message.
class Raised : public torch::PyTorchError {
 public:
  PyObject* python_type() override;
  static Raised fetch();  // takes the exception out of the error indicator
  void restore() const;   // sets the error indicator to it again

 private:
  struct Parts;
  Raised(const std::string& message, std::shared_ptr<Parts> parts);
  std::shared_ptr<Parts> parts_;
};

// Warns of something (a RuntimeWarning), with or without the GIL. Throws Raised where a filter makes it an exception.
void warn(const std::string& message);

// Sets Python's error indicator for a C++ exception.
void raise(const std::exception_ptr& failure);

// Calls `body` and makes its exceptions Python's.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (...) {
    raise(std::current_exception());
    return nullptr;
  }
}

// ---------------------------------------------------------------- the arguments of calls that dispatch kernels

inline Object item(PyObject* sequence, Py_ssize_t index) { return own(PySequence_GetItem(sequence, index)); }

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

// ---------------------------------------------------------------- functions and callbacks

// How functions get into the module metalcore._C: at namespace scope of the file that has them
//   const python::Methods registered(methods);
struct Methods {
  explicit Methods(PyMethodDef* methods);  // ends with a row of zeros
};

// Holds the GIL while it lives. Throws std::runtime_error where Python has ended.
class WithGil {
 public:
  WithGil() {
    if (!Py_IsInitialized())
      throw std::runtime_error("metalcore: Python has ended, and with it the compiler of kernels");
    state_ = PyGILState_Ensure();
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// A Python function that C++ calls from any thread: a compiler of kernels.
class Callback {
 public:
  // Sets the function, or none for None. Needs the GIL.
  void set(PyObject* callable) {
    if (callable != Py_None && !PyCallable_Check(callable))
      throw std::invalid_argument("metalcore: a compiler of kernels must be callable");
    PyObject* old = callable_;
    if (callable == Py_None) callable = nullptr;
    Py_XINCREF(callable);
    callable_ = callable;
    Py_XDECREF(old);
  }

  // Calls body(function) with the GIL. The calling thread must hold no lock that a thread with the GIL may wait for.
  // Throws `missing` where there is no function, and Raised for a Python exception.
  template <typename Body>
  auto call(const char* missing, const Body& body) const {
    const WithGil gil;
    if (!callable_) throw std::runtime_error(missing);
    Py_INCREF(callable_);
    const Object called(callable_);
    try {
      return body(called.get());
    } catch (const PythonError&) {
      throw Raised::fetch();
    }
  }

 private:
  PyObject* callable_ = nullptr;  // changed and read with the GIL
};

}  // namespace metalcore::python

// A Python function that C++ calls from any thread: a compiler of kernels.
#pragma once

#include "objects.h"

namespace metalcore::python {

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

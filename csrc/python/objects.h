// Python's objects and exceptions in C++, by Python's limited API only.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

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

// A Python exception on its way through C++ code, which may not hold the GIL; what() is its message.
class Raised : public std::runtime_error {
 public:
  static Raised fetch();  // takes the exception out of the error indicator
  void restore() const;   // sets the error indicator to it again

 private:
  struct Parts;
  Raised(const std::string& message, std::shared_ptr<Parts> parts);
  std::shared_ptr<Parts> parts_;
};

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

}  // namespace metalcore::python

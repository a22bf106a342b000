// Python's objects and exceptions in C++. Python's limited API only.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace metalcore::python {

// A reference that is given back.
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

struct PythonError {};  // the error indicator is set

inline PyObject* check(PyObject* object) {
  if (!object) throw PythonError();
  return object;
}

// A Python exception on its way through C++ code, which may be without the GIL; what() is its message.
class Raised : public std::runtime_error {
 public:
  static Raised fetch();  // takes the one of the error indicator
  void restore() const;   // sets it again

 private:
  struct Parts;
  Raised(const std::string& message, std::shared_ptr<Parts> parts);
  std::shared_ptr<Parts> parts_;
};

// Sets Python's error indicator for a C++ exception.
void raise(const std::exception_ptr& failure);

// Calls `body`, whose exceptions become Python's.
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

// Python's objects and exceptions in C++, by Python's limited API only.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

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

}  // namespace metalcore::python

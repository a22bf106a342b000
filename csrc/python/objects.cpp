#include "objects.h"

#include <new>
#include <optional>
#include <stdexcept>
#include <string>

namespace metalcore::python {

struct Raised::Parts {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;

  ~Parts() {
    if (!Py_IsInitialized()) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    PyGILState_Release(state);
  }
};

Raised::Raised(const std::string& message, std::shared_ptr<Parts> parts)
    : torch::PyTorchError(message), parts_(std::move(parts)) {}

PyObject* Raised::python_type() { return parts_->type; }

Raised Raised::fetch() {
  auto parts = std::make_shared<Parts>();
  PyErr_Fetch(&parts->type, &parts->value, &parts->traceback);
  PyErr_NormalizeException(&parts->type, &parts->value, &parts->traceback);
  const Object shown(parts->value ? PyObject_Str(parts->value) : nullptr);
  const Object bytes(shown ? PyUnicode_AsUTF8String(shown.get()) : nullptr);
  const char* message = bytes ? PyBytes_AsString(bytes.get()) : nullptr;
  PyErr_Clear();
  return Raised(message ? message : "an exception without a message", std::move(parts));
}

void Raised::restore() const {
  Py_XINCREF(parts_->type);
  Py_XINCREF(parts_->value);
  Py_XINCREF(parts_->traceback);
  PyErr_Restore(parts_->type, parts_->value, parts_->traceback);
}

void warn(const std::string& message) {
  if (!Py_IsInitialized()) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  std::optional<Raised> raised;
  if (PyErr_WarnEx(PyExc_RuntimeWarning, message.c_str(), 1) < 0) raised.emplace(Raised::fetch());
  PyGILState_Release(state);
  if (raised) throw *raised;
}

void raise(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const PythonError&) {
  } catch (const Raised& raised) {
    raised.restore();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

uint32_t to_uint32(PyObject* object) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (PyErr_Occurred()) throw PythonError();
  if (value > 0xffffffffull)
    throw std::invalid_argument("metalcore: " + std::to_string(value) + " does not fit in 32 bits");
  return static_cast<uint32_t>(value);
}

size_t to_size(PyObject* object) {
  const size_t size = PyLong_AsSize_t(object);
  if (PyErr_Occurred()) throw PythonError();
  return size;
}

gpu::Size to_grid(PyObject* sequence, const char* what) {
  if (length(sequence) != 3)
    throw std::invalid_argument(std::string("metalcore: ") + what + " must have three numbers");
  return {to_uint32(item(sequence, 0).get()), to_uint32(item(sequence, 1).get()), to_uint32(item(sequence, 2).get())};
}

Memory to_memory(PyObject* object) {
  if (!PyTuple_Check(object) || length(object) != 2)
    throw std::invalid_argument("metalcore: a buffer is None, (address, nbytes), bytes or a list of (address, nbytes)");
  void* address = PyLong_AsVoidPtr(item(object, 0).get());
  if (PyErr_Occurred()) throw PythonError();
  return {address, to_size(item(object, 1).get())};
}

}  // namespace metalcore::python

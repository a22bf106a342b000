#include "objects.h"

#include <new>
#include <optional>

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

}  // namespace metalcore::python

#include "arguments.h"

#include <stdexcept>
#include <string>

namespace metalcore::python {

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

#pragma once

#include <Python.h>

namespace metalcore {
PyObject* explain_python(PyObject* module, PyObject* args);
}

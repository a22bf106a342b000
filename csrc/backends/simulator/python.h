// The functions that metalcore._C gives Python to load and run translated libraries.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace metalcore::simulator {

extern PyMethodDef python_methods[];

}  // namespace metalcore::simulator

// The functions that metalcore._C gives Python about the Metal backend; that they are there says that it is.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace metalcore::mps {

extern PyMethodDef python_methods[];

}  // namespace metalcore::mps

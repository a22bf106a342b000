// The functions that metalcore._C gives Python about the Metal backend. A build without the backend lacks them.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace metalcore::mps {

extern PyMethodDef python_methods[];

}  // namespace metalcore::mps

// What metalcore._C offers about plans: explain, use_tuning, tuning_families.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace metalcore {
extern PyMethodDef plan_methods[];
}

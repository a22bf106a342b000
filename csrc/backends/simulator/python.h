// The functions that metalcore._C gives Python to load and run translated libraries.
#pragma once

#include "../../python/objects.h"

namespace metalcore::simulator {

extern PyMethodDef python_methods[];

}  // namespace metalcore::simulator

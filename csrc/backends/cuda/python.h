// The functions that metalcore._C gives Python for NVIDIA GPUs.
#pragma once

#include "../../python/objects.h"

namespace metalcore::cuda {

extern PyMethodDef python_methods[];

}  // namespace metalcore::cuda

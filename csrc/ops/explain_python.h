// What metalcore._C offers about plans: explain, use_tuning, tuning_families.
#pragma once

#include "../python/objects.h"

namespace metalcore {
extern PyMethodDef plan_methods[];
}

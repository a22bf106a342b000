// The services that a translated library is bound to.
#pragma once

#include "host/kernel_abi.h"

namespace metalcore::simulator {

const msl_abi::Runtime* normal_runtime();
const msl_abi::Runtime* checking_runtime();

}  // namespace metalcore::simulator

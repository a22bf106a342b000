// The random numbers of the simulated device. It has a CPU generator of its own, so a seed gives the CPU's numbers.
#pragma once

#include <ATen/core/Generator.h>

namespace metalcore::simulated_device {

const at::Generator& default_generator();
at::Generator new_generator();
// The CPU generator behind a generator of the device.
const at::Generator& cpu_generator(const at::Generator& generator);

}  // namespace metalcore::simulated_device

#pragma once

#include "../../csrc/backends/simulator/launch.h"

#include <cstddef>

namespace metalcore::metal_runtime {

// In bytes.
size_t static_memory(const simulator::KernelReference& kernel);

}  // namespace metalcore::metal_runtime

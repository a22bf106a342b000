// The slowest GPU that is supported, an M1 with 7 cores, as metalcore/estimates has it.
// `python -m benchmarks.apple` writes this file when it fits the model.
#pragma once

#include <cstdint>

namespace metalcore::gpu::slowest_chip {

constexpr uint32_t kCores = 7;
constexpr double kFlopsPerSecond = 2.29e+12;
constexpr double kBytesPerSecond = 5.418e+10;  // as the slowest tenth of measured kernels of their kind reach it
constexpr double kSecondsPerDispatch = 5.2e-06;

}  // namespace metalcore::gpu::slowest_chip

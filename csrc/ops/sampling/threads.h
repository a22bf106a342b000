// The threads that share a row from which the largest numbers are selected.
#pragma once

#include "../../gpu/limits.h"

#include <algorithm>
#include <cstdint>

namespace metalcore {

inline uint32_t selection_threads(int64_t length, uint32_t most) {
  constexpr int64_t kLeastNumbers = 4;  // of a thread
  const int64_t simdgroups = (length + kLeastNumbers * gpu::kSimdWidth - 1) / (kLeastNumbers * gpu::kSimdWidth);
  return static_cast<uint32_t>(std::min<int64_t>(simdgroups * gpu::kSimdWidth, most));
}

}  // namespace metalcore

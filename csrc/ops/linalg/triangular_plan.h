// How triangular systems are solved: which kernels of kernels/linalg/triangular_*.metal, over which grids.
#pragma once

#include "../../gpu/tuning.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class TriangularVariant { empty, simd, block, blocked, torch };

const char* name_of(TriangularVariant variant);

struct TriangularPlan {
  TriangularVariant variant;
  std::string why;
  std::string kernel;  // solves a system, or a panel of it
  uint32_t threads;    // of its threadgroups
  uint32_t slots;      // systems, or column tiles of them, that a threadgroup takes
  uint32_t columns;    // of a slot
  uint32_t panel;      // blocked: rows that are solved at a time …
  const char* update;  // … and the kernel that takes them out of the rows below, with so many threads,
  uint32_t update_threads;
  uint32_t update_rows, update_columns;  // rows and columns a threadgroup
};

// Of `batch` systems of `order` equations with `columns` right-hand sides.
TriangularPlan plan_triangular(int64_t order, int64_t columns, int64_t batch, const gpu::Tuning& tuning);

}  // namespace metalcore

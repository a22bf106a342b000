// How triangular systems are solved: which kernels of kernels/linalg/triangular_*.metal, over which grids.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "left_to_torch.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class TriangularVariant { empty, simd, block, blocked, torch };

const char* name_of(TriangularVariant variant);

struct TriangularTuning {
  const char* family;
  // Systems of order above 32. With fewer threadgroups of 32 right-hand sides than panel_groups, simdgroups share the
  // rows; above that a threadgroup takes more right-hand sides as long as there are `groups` threadgroups. Systems with
  // one right-hand side take many threads each where there are fewer of them than vector_batch.
  uint32_t panel_groups = 1024;
  uint32_t groups = 256;
  uint32_t vector_batch = 264;
  // With more than four right-hand sides, and with one. (With two to four none is left to PyTorch.)
  LeftToTorch torch = {}, vector_torch = {};
};
extern const gpu::Table<TriangularTuning> triangular_tuning;

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
TriangularPlan plan_triangular(int64_t order, int64_t columns, int64_t batch, const TriangularTuning& tuning);

}  // namespace metalcore

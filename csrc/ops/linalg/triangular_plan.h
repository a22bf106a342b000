// How triangular systems are solved: the kernels of kernels/linalg/triangular_*.metal, and their grids.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "torch_regions.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class TriangularVariant { empty, simd, block, blocked, torch, cpu };

const char* name_of(TriangularVariant variant);

struct TriangularTuning {
  const char* family;
  // These three are for systems of order above 32. Where 32 right-hand sides per threadgroup make fewer than
  // panel_threadgroups threadgroups, the simdgroups of a threadgroup share the rows. Otherwise a threadgroup takes more
  // right-hand sides, as long as `threadgroups` threadgroups remain. Systems with one right-hand side get many threads
  // each where the batch is smaller than vector_batch.
  // On Apple GPUs a threadgroup that does not share rows is one simdgroup; two threadgroups for each core even out
  // their load; and two of the largest threadgroups for a vector (17 simdgroups) keep a core busy.
  gpu::Count panel_threadgroups = gpu::filling_threadgroups(1);
  gpu::Count threadgroups = gpu::per_core(2);
  gpu::Count vector_batch = gpu::per_core(2);
  bool few_registers = false;  // whether threads hold nothing of the tile that they use next
  // Systems with more than four right-hand sides, and systems with one. PyTorch takes none with two to four.
  TorchRegions torch = {}, vector_torch = {};
  // Systems with two right-hand sides and more, and systems with one.
  TorchRegions cpu = {}, vector_cpu = {};
};
extern const gpu::Table<TriangularTuning> triangular_tuning;

struct TriangularPlan {
  TriangularVariant variant;
  std::string why;
  std::string kernel;  // solves a system, or a panel of one
  uint32_t threads;    // threads of a threadgroup
  uint32_t slots;      // systems, or column tiles of systems, per threadgroup
  uint32_t columns;    // columns of a slot
  // The blocked variant solves `panel` rows at a time, and the kernel `update` subtracts them from the rows below.
  uint32_t panel;
  const char* update;
  uint32_t update_threads;               // threads of a threadgroup
  uint32_t update_rows, update_columns;  // rows and columns per threadgroup
};

// The plan for `batch` systems of `order` equations with `columns` right-hand sides.
TriangularPlan plan_triangular(int64_t order, int64_t columns, int64_t batch, const TriangularTuning& tuning);

}  // namespace metalcore

// How a Cholesky factorization runs: the kernels of kernels/linalg/cholesky_*.metal, and their grids.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "torch_regions.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class CholeskyVariant { empty, simd, block, blocked, torch, cpu };

const char* name_of(CholeskyVariant variant);

struct CholeskyPlan {
  CholeskyVariant variant;
  std::string why;
  const char* kernel;  // simd, block
  uint32_t matrices_per_threadgroup;
  uint32_t threads;  // threads of a threadgroup
  uint32_t panels;   // blocked
};

struct CholeskyTuning {
  const char* family;
  // A threadgroup factors matrices of up to so many rows, and larger ones take panels. PyTorch gets no upper factors,
  // because they cost it one more copy.
  uint32_t block_rows = 128;
  TorchRegions torch = {}, cpu = {};
};
extern const gpu::Table<CholeskyTuning> cholesky_tuning;

// The plan for `batch` n x n matrices.
CholeskyPlan plan_cholesky(int64_t n, int64_t batch, bool upper, const CholeskyTuning& tuning);

// Panel i of an n x n matrix, with `slices` threadgroups of `threads` threads.
struct CholeskyPanel {
  uint32_t first, width, slices, threads;
};
CholeskyPanel cholesky_panel(uint32_t n, uint32_t i);

}  // namespace metalcore

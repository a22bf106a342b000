// How a Cholesky factorization runs: which kernels of kernels/linalg/cholesky_*.metal, over which grids.
#pragma once

#include "../../gpu/tuning.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class CholeskyVariant { empty, simd, block, blocked, torch };

const char* name_of(CholeskyVariant variant);

struct CholeskyPlan {
  CholeskyVariant variant;
  std::string why;
  const char* kernel;  // simd, block
  uint32_t matrices_per_threadgroup;
  uint32_t threads;  // of a threadgroup
  uint32_t panels;   // blocked
};

// Of `batch` matrices, n x n.
CholeskyPlan plan_cholesky(int64_t n, int64_t batch, bool upper, const gpu::Tuning& tuning);

// Panel i of an n x n matrix, and the threadgroups and threads that it takes.
struct CholeskyPanel {
  uint32_t first, width, slices, threads;
};
CholeskyPanel cholesky_panel(uint32_t n, uint32_t i);

}  // namespace metalcore

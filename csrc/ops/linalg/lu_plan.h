// How an LU factorization runs, alone or with the solution of A X = B: the kernels of kernels/linalg/lu_*.metal.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "torch_regions.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class LuVariant { empty, thread, simd, block, blocked, torch, cpu };

const char* name_of(LuVariant variant);

struct LuTuning {
  const char* family;
  // A threadgroup of up to so many threads factors a matrix in registers.
  uint32_t block_threads = 1024;
  // Factorizations, and systems whose factors are given.
  TorchRegions torch = {}, solve_torch = {};
  TorchRegions cpu = {}, solve_cpu = {};
};
extern const gpu::Table<LuTuning> lu_tuning;

struct LuPlan {
  LuVariant variant;
  std::string why;
  std::string kernel;    // variants thread, simd and block
  uint32_t matrices;     // matrices per threadgroup
  uint32_t threads;      // threads of a threadgroup
  uint32_t row_threads;  // block: the threads that share a column
  uint32_t tile;         // columns of B that the kernel also solves; 0: two triangular systems follow
};

// The plan for `batch` m x n matrices and a B with `b_columns` columns (0: only the factorization). For matrices that
// are already `factored`, b_columns is not 0, and variant blocked means two triangular systems.
LuPlan plan_lu(int64_t m, int64_t n, int64_t batch, int64_t b_columns, const LuTuning& tuning, bool factored = false);

// The kernel for a panel of the blocked variant with `rows` rows.
struct LuPanel {
  const char* kernel;
  uint32_t width, threads, row_threads;
};
LuPanel lu_panel(uint32_t rows);

}  // namespace metalcore

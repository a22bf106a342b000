// How an LU factorization runs, by itself or with the solution of A X = B: which kernels of kernels/linalg/lu_*.metal.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "left_to_torch.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class LuVariant { empty, thread, simd, block, blocked, torch };

const char* name_of(LuVariant variant);

struct LuTuning {
  const char* family;
  // Matrices (with columns of B) that fit so many threads, of 32 elements each, are factored in registers.
  uint32_t block_threads = 1024;
  LeftToTorch torch = {}, solve_torch = {};  // factorizations, and systems whose factors are given
};
extern const gpu::Table<LuTuning> lu_tuning;

struct LuPlan {
  LuVariant variant;
  std::string why;
  std::string kernel;    // of thread, simd and block
  uint32_t matrices;     // a threadgroup
  uint32_t threads;      // of a threadgroup
  uint32_t row_threads;  // block: of them, those that share a column
  uint32_t tile;         // columns of B that are taken along; 0 where B is solved for afterwards, by triangular systems
};

// Of `batch` m x n matrices, with B of `right` columns (0: only the factorization); or of matrices that are `factored`
// already, where blocked stands for two triangular systems, and `right` is not 0.
LuPlan plan_lu(int64_t m, int64_t n, int64_t batch, int64_t right, const LuTuning& tuning, bool factored = false);

// The kernel for a panel of the blocked variant with so many rows.
struct LuPanel {
  const char* kernel;
  uint32_t width, threads, row_threads;
};
LuPanel lu_panel(uint32_t rows);

}  // namespace metalcore

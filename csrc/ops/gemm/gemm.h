// Products of matrices: their plans, by sizes and strides alone, and products in memory that the caller has.
#pragma once

#include "../../../kernels/gemm/gemm.h"
#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "../common/common.h"

#include <cstdint>
#include <string>
#include <vector>

namespace metalcore {

// Distances in elements, and whether memory begins at a multiple of 16 bytes.
struct GemmMatrix {
  int64_t row = 0, column = 0;
  bool aligned = false;
};

// A dimension of the batch, and the distances along it: 0 where an operand is the same for all of it.
struct GemmBatchDim {
  int64_t size, a, b, residual;
};

// The result is contiguous.
struct GemmProblem {
  int64_t rows, columns, terms;
  GemmMatrix a, b, residual;
  std::vector<GemmBatchDim> batch;  // outermost first
  bool has_bias = false, has_residual = false;
  bool bias_of_rows = false;         // or else of columns
  uint32_t grouped = 0, groups = 0;  // GEMM_GROUPED_…; there is no other batch then
  int64_t b_group = 0;               // the distance of the groups' matrices b
};

struct GemmTuning {
  const char* family;
  uint32_t few_rows = 8;  // up to which the kernels for few rows are faster than tiles
  // From so many on, in the whole batch, large tiles are faster than small ones: threadgroups of 8 simdgroups.
  gpu::Count large_tiles = gpu::filling_threadgroups(8);
  // Whether small tiles take kernels for few registers: short steps, or floats that are not loaded ahead.
  bool short_steps = false;
  // Whether the GPU has units that multiply tensors of 16-bit elements, and how many threadgroups keep
  // them busy.
  bool units = false;
  gpu::Count unit_threadgroups = gpu::per_core(1);
  // From so many on, wide tiles of units are faster than others.
  gpu::Count wide_tiles = 1;
  uint32_t most_together = 1;  // threadgroups that the GPU runs together
};

struct GemmPlan {
  const char* variant;  // as in the kernels' names: "gemm", "gemm_large", "gemm_unit_nt", "gemv_terms1" …
  GemmParams params;
  uint32_t across;     // threadgroups side by side
  uint32_t tiles;      // threadgroups below each other, of the whole batch
  uint32_t tile_rows;  // of the result
  uint32_t threads;
  bool transposed;            // whether it is the transposed product, of which b is the first operand
  uint32_t tile_columns = 0;  // where units multiply tensors
  uint32_t splits = 1;        // threadgroups that share a tile, and have a part of the terms each
};

// Whether a dispatch can count what there is. Everything else goes to PyTorch.
bool gemm_countable(const GemmProblem& problem);

// It joins the dimensions of the batch where strides allow that, and makes rows of them where b is the same for all.
// There are at most GEMM_BATCH_DIMS of them.
// A problem with units has them if it is large enough and its operands have distances that they take.
bool gemm_takes_units(GemmProblem problem, int64_t element_size, const GemmTuning& tuning);
GemmPlan plan_gemm(GemmProblem problem, int64_t element_size, const GemmTuning& tuning);
// How many of `splits` threadgroups of each tile run together, where those of all tiles fit at once.
int64_t units_together(int64_t tiles, int64_t splits, const GemmTuning& tuning, int64_t on_a_core = 1);
bool is_tiled(const GemmPlan& plan);  // or else it is one for few rows
std::string why_gemm(const GemmPlan& plan);

// Whether memory begins at a multiple of 16 bytes.
bool begins_aligned(const Tensor& tensor);

// How many threadgroups keep the units busy that multiply tensors of the dtype of `like` on its device; 0 if it has
// none.
int64_t unit_threadgroups(const Tensor& like);
// units_together() of its tuning.
int64_t units_together(int64_t tiles, int64_t splits, const Tensor& like);
// Whether these units take the problem of an op there.
bool units_take(const GemmProblem& problem, const Tensor& like);

// What a problem's distances lead to, from the first element of each tensor on; `ends` are those of groups.
struct GemmOperands {
  Tensor a, b;
  MaybeTensor bias, residual, ends;
};
// Computes what `problem` says for `op`. The result has its order of elements.
void gemm_into(const char* op, const GemmProblem& problem, const GemmOperands& operands, uint32_t activation,
               double alpha, double beta, const Tensor& result);

// One of kernels/gemm/gemm.h's, or 0. Its name is Python's, or "none".
uint32_t activation_number(const char* op, const std::string& name);

// result = activation(alpha a b + bias + beta residual), contiguous. `activation` is 0 or one of kernels/gemm/gemm.h's.
// The caller has checked that all go together, and the bias is contiguous.
void matmul_into(const Tensor& result, const Tensor& a, const Tensor& b, const MaybeTensor& bias,
                 const MaybeTensor& residual, uint32_t activation, double alpha, double beta);

// a (rows, terms) by the groups of b (groups, terms, columns), whose rows end at `ends` (int32, contiguous); or by b
// (terms, columns), where the groups' terms end there. The result is contiguous.
void grouped_gemm_into(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor& ends);

}  // namespace metalcore

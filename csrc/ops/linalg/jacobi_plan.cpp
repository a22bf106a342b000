#include "jacobi_plan.h"

#include "matrices.h"

#include <algorithm>

namespace metalcore {

// PyTorch has no kernel of it on mps.
const gpu::Table<JacobiTuning> jacobi_tuning("jacobi", {{"eigh_torch", &JacobiTuning::eigh_torch, {.only_on = "cuda"}}},
                                             {
                                                 {.family = "baseline"},
                                                 {.family = "hopper",
                                                  .eigh_torch = {{.above = 512, .max_batch = 4}, {.above = 1024}}},
                                             });

namespace {

constexpr int64_t kSimdSize = 32;
constexpr uint32_t kSimdThreadgroup = 4;  // simdgroups

// The kernels in which a threadgroup holds a matrix.
struct BlockKernel {
  int64_t size;
  uint32_t simdgroups;
};
constexpr BlockKernel kBlockKernels[] = {{64, 4}, {128, 16}};
constexpr int64_t kBlockSize = 128;

// `rows` is 0 for kernels of square matrices only.
JacobiPlan kernel_plan(const std::string& op, const std::string& values, int64_t rows, int64_t n,
                       const std::string& what) {
  if (std::max(rows, n) <= kSimdSize) {
    const uint32_t lanes = power_from_8(n);
    const std::string suffix = rows ? times(power_from_8(rows), lanes) : std::to_string(lanes);
    return {JacobiVariant::simd,
            false,
            what + ": Jacobi, a column a lane of a simdgroup",
            op + "simd_" + values + suffix,
            kSimdThreadgroup * gpu::kSimdWidth / lanes,
            kSimdThreadgroup * gpu::kSimdWidth};
  }
  const BlockKernel& kernel = std::max(rows, n) <= kBlockKernels[0].size ? kBlockKernels[0] : kBlockKernels[1];
  return {JacobiVariant::block,
          false,
          what + ": Jacobi in the registers of a threadgroup",
          op + "block_" + values + std::to_string(kernel.size),
          1,
          kernel.simdgroups * gpu::kSimdWidth};
}

}  // namespace

const char* name_of(JacobiVariant variant) {
  switch (variant) {
    case JacobiVariant::empty: return "empty";
    case JacobiVariant::simd: return "simd";
    case JacobiVariant::block: return "block";
    case JacobiVariant::blocked: return "blocked";
    case JacobiVariant::torch: return "torch";
  }
  return "";
}

JacobiPlan plan_svd(int64_t m, int64_t n, int64_t batch, bool full_matrices, bool compute_uv) {
  const int64_t rows = std::max(m, n), columns = std::min(m, n);
  if (batch == 0 || columns == 0)
    return {JacobiVariant::empty, false, times(m, n) + " has no singular values", "", 0, 0};
  if (columns > kBlockSize)
    return {
        JacobiVariant::blocked, true, times(m, n) + ", its QR's R: blocks of columns, orthogonal in pairs", "", 0, 0};
  const std::string values = compute_uv ? "" : "values_";
  const int64_t most_rows = columns <= kSimdSize ? kSimdSize : kBlockKernels[0].size;
  // The columns of Rᵀ are nearer to orthogonal than A's, and much nearer where A's rows are graded. With many columns,
  // that saves more sweeps than the QR and the product with Q cost.
  if (rows > most_rows || (full_matrices && compute_uv && rows > columns)) {
    JacobiPlan plan = kernel_plan("svd_", values, columns, columns, times(m, n) + ", its QR's R");
    plan.after_qr = true;
    return plan;
  }
  return kernel_plan("svd_", values, rows, columns, times(m, n));
}

JacobiPlan plan_eigh(int64_t n, int64_t batch, bool compute_v, const JacobiTuning& tuning) {
  if (batch == 0 || n == 0) return {JacobiVariant::empty, false, times(n, n) + " has no eigenvalues", "", 0, 0};
  if (tuning.eigh_torch.contain(n, batch))
    return {JacobiVariant::torch,
            false,
            std::to_string(batch) + " of " + times(n, n) + ": " + faster_by_torch(tuning.family),
            "",
            0,
            0};
  if (n > kBlockSize)
    return {JacobiVariant::blocked, false, times(n, n) + ": blocks of columns, orthogonal in pairs", "", 0, 0};
  return kernel_plan("eigh_", compute_v ? "" : "values_", 0, n, times(n, n));
}

}  // namespace metalcore

#include "jacobi.h"

#include "../../../kernels/linalg/spectral.h"

#include "matrices.h"
#include "tridiagonal.h"

#include <algorithm>

namespace metalcore {

// svd_cpu and eigh_cpu of Apple's GPUs are estimates, for the slowest GPU that Metal supports here, an M1's with 2.6
// TFLOP/s of float32 and 68 GB/s. A sweep of the blocked method has n / 16 rounds. Each reads the columns twice and
// writes them once, and multiplies pairs of blocks by 32 x 32 matrices twice: 12 n³ flops with the accumulated V, whose
// columns are twice as long. With 9 sweeps that is 108 n³ flops and 13 n³ bytes, where LAPACK needs about 22 n³ flops
// (gesdd). Published times of svd with Accelerate are 22 ms for n = 500 and 105 ms for n = 1000, in float64
// (ml3x.com/research/matrix-numpy-benchmark). The bytes alone take an M1's GPU 0.19 s for n = 1000. For n = 500 they
// fit its cache, and the flops take 14 ms at 1 TFLOP/s. So the sides meet between the two, and above 1024 a single
// matrix keeps the GPU busy for more than the 200 ms that a command buffer may take, whatever the batch.
//
// eigh above 128 rows has tridiagonal form. `python -m metalcore estimate eigh 1x512x512 --gpu m1` says 8.9 ms (7.7 to
// 10.3), and 5.2 ms for 384 rows and 2.8 ms for 256. Nobody has published LAPACK's time (syevd). By flops, 9 n³ beside
// gesdd's 22 n³, it is 9 ms for n = 500 in float64. So the sides meet where its row begins.
//
// Nobody has measured any of this on a Mac. The other factorizations have as many flops on the GPU as in LAPACK, and
// stay there.
//
// PyTorch has kernels of svd and eigh on mps since 2.14. Nobody has measured them beside these.
constexpr TorchRegions kSlowOnApple = {{.above = 512, .max_batch = 1}, {.above = 1024}};

const gpu::Table<JacobiTuning> jacobi_tuning(
    "jacobi",
    {
        {"few_registers", &JacobiTuning::few_registers},
        {"wide_columns", &JacobiTuning::wide_columns, {1, 1 << 16}},
        {"polar_columns", &JacobiTuning::polar_columns, {1, 1 << 16}},
        {"eigh_torch", &JacobiTuning::eigh_torch, {.calls = "_linalg_eigh"}},
        {"svd_torch", &JacobiTuning::svd_torch, {.calls = "_linalg_svd"}},
        {"svd_cpu", &JacobiTuning::svd_cpu, {.only_on = "mps"}},
        {"eigh_cpu", &JacobiTuning::eigh_cpu, {.only_on = "mps"}},
    },
    {
        {.family = "baseline"},
        {.family = "apple7", .few_registers = true, .svd_cpu = kSlowOnApple, .eigh_cpu = kSlowOnApple},
        {.family = "apple8", .few_registers = true, .svd_cpu = kSlowOnApple, .eigh_cpu = kSlowOnApple},
        {.family = "apple9", .few_registers = true, .svd_cpu = kSlowOnApple, .eigh_cpu = kSlowOnApple},
        {.family = "apple10", .few_registers = true, .svd_cpu = kSlowOnApple, .eigh_cpu = kSlowOnApple},
        {.family = "hopper", .polar_columns = 512},
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
// Kernels of complex numbers, which take twice the registers.
constexpr BlockKernel kComplexEighKernels[] = {{32, 4}, {64, 8}, {128, 16}};
constexpr BlockKernel kComplexSvdKernels[] = {{32, 2}, {64, 8}, {128, 16}};
constexpr int64_t kComplexWithV = 64;  // the largest of svd whose threadgroup holds V too

// The largest matrices that a simdgroup holds. A complex number takes two registers.
int64_t most_of_simd(bool is_complex) { return is_complex ? kSimdSize / 2 : kSimdSize; }

// A simdgroup takes larger complex matrices by QL where threads have registers enough. Its steps follow one another, so
// that a threadgroup is faster with few matrices: on an H200 it takes 66 µs for 8 of 32 x 32, and a simdgroup 104; for
// 512 they take 125 and 107.
constexpr int64_t kManyMatrices = 400;

// The lanes of a simdgroup that share a matrix: as many as it has columns, and more for complex ones.
uint32_t lanes_of(uint32_t columns, bool is_complex) { return is_complex && columns > 8 ? gpu::kSimdWidth : columns; }

// `rows` is 0 for kernels of square matrices only.
JacobiPlan kernel_plan(const std::string& name, const std::string& values, int64_t rows, int64_t n, bool is_complex,
                       const std::string& what) {
  const std::string op = name + (is_complex ? "complex_" : "");
  const int64_t larger = std::max(rows, n);
  if (larger <= most_of_simd(is_complex)) {
    const uint32_t columns = power_from_8(n);
    const std::string suffix = rows ? times(power_from_8(rows), columns) : std::to_string(columns);
    return {JacobiVariant::simd,
            false,
            what + ": Jacobi in the registers of a simdgroup",
            op + "simd_" + values + suffix,
            kSimdThreadgroup * gpu::kSimdWidth / lanes_of(columns, is_complex),
            kSimdThreadgroup * gpu::kSimdWidth};
  }
  const BlockKernel* kernels = !is_complex ? kBlockKernels : rows > 0 ? kComplexSvdKernels : kComplexEighKernels;
  while (kernels->size < larger) ++kernels;
  const BlockKernel& kernel = *kernels;
  return {JacobiVariant::block,
          false,
          what + ": Jacobi in the registers of a threadgroup",
          op + "block_" + values + std::to_string(kernel.size),
          1,
          kernel.simdgroups * gpu::kSimdWidth};
}

struct LeanKernel {
  const char *instead_of, *name;
  uint32_t simdgroups;
};
constexpr LeanKernel kLeanKernels[] = {{"svd_simd_32x32", "svd_lean_32", 2}, {"svd_block_64", "svd_lean_64", 8}};

JacobiPlan fitted(JacobiPlan plan, const JacobiTuning& tuning) {
  for (const LeanKernel& lean : kLeanKernels) {
    if (!tuning.few_registers || plan.kernel != lean.instead_of) continue;
    plan.variant = JacobiVariant::block;
    plan.why += ", with few registers for each";
    plan.kernel = lean.name;
    plan.matrices_per_threadgroup = 1;
    plan.threads = lean.simdgroups * gpu::kSimdWidth;
  }
  return plan;
}

JacobiPlan torch_plan(const std::string& size, int64_t batch, const JacobiTuning& tuning) {
  return {JacobiVariant::torch,
          false,
          std::to_string(batch) + " of " + size + ": " + faster_by_torch(tuning.family),
          "",
          0,
          0};
}

JacobiPlan cpu_plan(const std::string& size, int64_t batch, const JacobiTuning& tuning) {
  return {
      JacobiVariant::cpu, false, std::to_string(batch) + " of " + size + ": " + faster_on_cpu(tuning.family), "", 0, 0};
}

std::string blocks_of_columns(int64_t columns, const JacobiTuning& tuning) {
  return std::to_string(columns >= tuning.wide_columns ? JACOBI_WIDE : JACOBI_BLOCK) + " columns, orthogonal in pairs";
}

}  // namespace

JacobiPlan too_large_plan(const std::string& size) {
  return {JacobiVariant::cpu, false, too_large_for_kernels(size), "", 0, 0};
}

const char* name_of(JacobiVariant variant) {
  switch (variant) {
    case JacobiVariant::empty: return "empty";
    case JacobiVariant::simd: return "simd";
    case JacobiVariant::block: return "block";
    case JacobiVariant::blocked: return "blocked";
    case JacobiVariant::tridiagonal: return "tridiagonal";
    case JacobiVariant::polar: return "polar";
    case JacobiVariant::torch: return "torch";
    case JacobiVariant::cpu: return "cpu";
  }
  return "";
}

JacobiPlan plan_svd(int64_t m, int64_t n, int64_t batch, bool full_matrices, bool compute_uv, bool is_complex,
                    const JacobiTuning& tuning) {
  const int64_t rows = std::max(m, n), columns = std::min(m, n);
  if (batch == 0 || columns == 0)
    return {JacobiVariant::empty, false, times(m, n) + " has no singular values", "", 0, 0};
  if (tuning.svd_cpu.contain(columns, batch)) return cpu_plan(times(m, n), batch, tuning);
  if (tuning.svd_torch.contain(columns, batch)) return torch_plan(times(m, n), batch, tuning);
  if (is_complex && columns > kBlockSize) return too_large_plan(times(m, n));
  if (columns > kBlockSize && columns >= tuning.polar_columns)
    return {JacobiVariant::polar,
            rows > columns,
            times(m, n) + (rows > columns ? ", its QR's R" : "") +
                ": polar decomposition, and eigh of its Hermitian factor",
            "",
            0,
            0};
  if (columns > kBlockSize)
    return {JacobiVariant::blocked,
            true,
            times(m, n) + ", its QR's R: blocks of " + blocks_of_columns(columns, tuning),
            "",
            0,
            0};
  const std::string values = compute_uv ? "" : "values_";
  const int64_t most_rows = columns <= kSimdSize ? kSimdSize : kBlockKernels[0].size;
  // The columns of Rᵀ are nearer to orthogonal than A's, and much nearer where A's rows are graded. With many columns,
  // that saves more sweeps than the QR and the product with Q cost.
  if (rows > most_rows || (full_matrices && compute_uv && rows > columns)) {
    JacobiPlan plan =
        fitted(kernel_plan("svd_", values, columns, columns, is_complex, times(m, n) + ", its QR's R"), tuning);
    plan.after_qr = true;
    plan.only_left = is_complex && columns > kComplexWithV;
    return plan;
  }
  return fitted(kernel_plan("svd_", values, rows, columns, is_complex, times(m, n)), tuning);
}

JacobiPlan plan_eigh(int64_t n, int64_t batch, bool compute_v, bool is_complex, const JacobiTuning& tuning) {
  if (batch == 0 || n == 0) return {JacobiVariant::empty, false, times(n, n) + " has no eigenvalues", "", 0, 0};
  if (tuning.eigh_cpu.contain(n, batch)) return cpu_plan(times(n, n), batch, tuning);
  if (tuning.eigh_torch.contain(n, batch)) return torch_plan(times(n, n), batch, tuning);
  if (is_complex && n > kLargestComplexTridiagonal) return too_large_plan(times(n, n));
  if (n > kBlockSize)
    return {JacobiVariant::tridiagonal,
            false,
            times(n, n) + ": tridiagonal form by reflectors, then divide and conquer",
            "",
            0,
            0};
  const std::string values = compute_v ? "" : "values_";
  if (is_complex && n > most_of_simd(is_complex) && n <= kSimdSize && batch > kManyMatrices && !tuning.few_registers)
    return {JacobiVariant::simd,
            false,
            times(n, n) + ": tridiagonal form and QL in the registers of a simdgroup",
            "eigh_ql_complex_" + values + "32",
            EIGH_QL_SIMDGROUPS,
            EIGH_QL_SIMDGROUPS * gpu::kSimdWidth};
  return kernel_plan("eigh_", values, 0, n, is_complex, times(n, n));
}

}  // namespace metalcore

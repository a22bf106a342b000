#include "triangular_plan.h"

#include "../../../kernels/linalg/triangular.h"
#include "matrices.h"

#include <algorithm>

namespace metalcore {

namespace {

constexpr uint32_t kSimdOrder = 32;

// 8, 16 or 32: the first that is not below n, or 32.
uint32_t power_to_32(int64_t n) { return n <= 8 ? 8 : n <= 16 ? 16 : 32; }

// Simdgroups in a threadgroup, as threadgroup memory allows: triangular_simd.metal.
uint32_t simdgroups(uint32_t order, uint32_t lanes) { return order == 32 ? lanes / 8 : 4; }

TriangularPlan simd_plan(int64_t order, int64_t columns) {
  const uint32_t rows = power_to_32(order);
  if (columns <= TRIANGULAR_FEW) {
    const uint32_t few = columns == 1 ? 1 : TRIANGULAR_FEW;
    return {.variant = TriangularVariant::simd,
            .why = "a row a lane, with its " + std::to_string(columns) + " right-hand sides",
            .kernel = "trsv_simd_" + times(rows, few),
            .threads = 4 * gpu::kSimdWidth,
            .slots = 4 * gpu::kSimdWidth / rows,
            .columns = few};
  }
  const uint32_t lanes = power_to_32(columns), groups = simdgroups(rows, lanes);
  return {.variant = TriangularVariant::simd,
          .why = "a right-hand side a lane, " + std::to_string(lanes) + " lanes a system",
          .kernel = "trsm_simd_" + times(rows, lanes),
          .threads = groups * gpu::kSimdWidth,
          .slots = groups * gpu::kSimdWidth / lanes,
          .columns = lanes};
}

// A system or a panel by a threadgroup; as many columns a threadgroup as leave the GPU enough of them.
TriangularPlan block_plan(int64_t columns, int64_t batch, const gpu::Tuning& tuning) {
  if (columns <= TRIANGULAR_FEW) {
    const uint32_t few = columns == 1 ? 1 : TRIANGULAR_FEW;
    return {.kernel = "trsv_block_" + std::to_string(few), .threads = 256, .slots = 1, .columns = few};
  }
  uint32_t threads = 128;
  while (threads > 32 && (2 * columns <= threads || batch * ceil_div<int64_t>(columns, threads) < tuning.triangular_groups))
    threads /= 2;
  return {.kernel = "trsm_block_" + std::to_string(threads), .threads = threads, .slots = 1, .columns = threads};
}

}  // namespace

const char* name_of(TriangularVariant variant) {
  switch (variant) {
    case TriangularVariant::empty: return "empty";
    case TriangularVariant::simd: return "simd";
    case TriangularVariant::block: return "block";
    case TriangularVariant::blocked: return "blocked";
    case TriangularVariant::torch: return "torch";
  }
  return "";
}

TriangularPlan plan_triangular(int64_t order, int64_t columns, int64_t batch, const gpu::Tuning& tuning) {
  const std::string size = times(order, order) + " with " + std::to_string(columns) + " right-hand sides: ";
  auto named = [&](TriangularPlan plan) {
    plan.why = size + plan.why;
    return plan;
  };
  if (order == 0 || columns == 0 || batch == 0)
    return {.variant = TriangularVariant::empty, .why = size + "X has no elements"};
  if (order <= kSimdOrder) return named(simd_plan(order, columns));
  if (order >= tuning.triangular_torch_order && batch <= tuning.triangular_torch_batch)
    return {.variant = TriangularVariant::torch, .why = size + "PyTorch's op is faster for so few large systems"};

  const bool few = columns <= TRIANGULAR_FEW;
  TriangularPlan plan = block_plan(columns, batch, tuning);
  const int64_t whole = few ? TRIANGULAR_VECTOR_ORDER : tuning.triangular_block_order;
  if (order <= whole) {
    plan.variant = TriangularVariant::block;
    plan.why = few ? "a threadgroup a system, which keeps X in threadgroup memory"
                   : "a right-hand side a thread, " + std::to_string(plan.columns) + " a threadgroup";
    return named(plan);
  }
  plan.variant = TriangularVariant::blocked;
  plan.panel = few ? TRIANGULAR_VECTOR_ORDER : tuning.triangular_panel;
  plan.why = "panels of " + std::to_string(plan.panel) + " rows, each solved and then taken out of the rows below";
  plan.update = few ? (columns == 1 ? "trsv_update_1" : "trsv_update_4") : "trsm_update";
  plan.update_threads = few ? 256 : 128;
  plan.update_rows = few ? TRIANGULAR_TILE : TRIANGULAR_UPDATE;
  plan.update_columns = few ? TRIANGULAR_FEW : TRIANGULAR_UPDATE;
  return named(plan);
}

}  // namespace metalcore

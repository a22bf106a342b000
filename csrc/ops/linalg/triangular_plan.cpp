#include "triangular_plan.h"

#include "../../../kernels/linalg/triangular.h"
#include "matrices.h"

#include <algorithm>

namespace metalcore {

constexpr gpu::Legal kCount = {0, 1 << 16};
const gpu::Table<TriangularTuning> triangular_tuning(
    "triangular",
    {
        {"panel_threadgroups", &TriangularTuning::panel_threadgroups, kCount},
        {"threadgroups", &TriangularTuning::threadgroups, kCount},
        {"vector_batch", &TriangularTuning::vector_batch, kCount},
        {"few_registers", &TriangularTuning::few_registers},
        {"torch", &TriangularTuning::torch},
        {"vector_torch", &TriangularTuning::vector_torch},
        {"cpu", &TriangularTuning::cpu, {.only_on = "mps"}},
        {"vector_cpu", &TriangularTuning::vector_cpu, {.only_on = "mps"}},
    },
    {
        {.family = "baseline"},
        {.family = "apple7", .few_registers = true},
        {.family = "apple8", .few_registers = true},
        {.family = "apple9", .few_registers = true},
        {.family = "apple10", .few_registers = true},
        {.family = "hopper",
         .panel_threadgroups = 1024,
         .threadgroups = 256,
         .vector_batch = gpu::per_core(2),
         .torch = {{.above = 63, .max_batch = 1}},
         .vector_torch = {{.above = 511, .max_batch = 1}}},
        {.family = "simulator", .panel_threadgroups = 1024, .threadgroups = 256, .vector_batch = 264},
    });

namespace {

constexpr uint32_t kSimdOrder = 32;

// The first of 8, 16 and 32 that is at least n, or else 32.
uint32_t power_to_32(int64_t n) { return n <= 8 ? 8 : n <= 16 ? 16 : 32; }

// Simdgroups in a threadgroup. The threadgroup memory of triangular_simd.metal limits them.
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
  const uint32_t lanes = power_to_32(columns), threads = simdgroups(rows, lanes) * gpu::kSimdWidth;
  return {.variant = TriangularVariant::simd,
          .why = "a right-hand side a lane, " + std::to_string(lanes) + " lanes a system",
          .kernel = "trsm_simd_" + times(rows, lanes),
          .threads = threads,
          .slots = threads / lanes,
          .columns = lanes};
}

// A threadgroup takes a system, or a panel of one: one simdgroup solves while the others multiply. A GPU with few
// systems gets more of them, because it has little else to do.
TriangularPlan few_plan(int64_t order, int64_t columns, int64_t batch, const TriangularTuning& tuning) {
  const uint32_t few = columns == 1 ? 1 : TRIANGULAR_FEW;
  const uint32_t workers = order <= TRIANGULAR_VECTOR_SMALL ? 2 : few == 1 && batch < tuning.vector_batch ? 16 : 4;
  return {.why = "a threadgroup a system, which keeps X in threadgroup memory",
          .kernel = "trsv_block_" + times(few, workers),
          .threads = (workers + 1) * gpu::kSimdWidth,
          .slots = 1,
          .columns = few};
}

// A thread takes a right-hand side. Where that makes few threadgroups, simdgroups share the rows instead.
TriangularPlan many_plan(int64_t order, int64_t columns, int64_t batch, const TriangularTuning& tuning) {
  const auto threadgroups = [&](uint32_t width) { return batch * ceil_div<int64_t>(columns, width); };
  if (order <= TRIANGULAR_PANEL && threadgroups(32) < tuning.panel_threadgroups)
    return {.why = "32 right-hand sides a threadgroup, whose simdgroups share the rows",
            .kernel = "trsm_panel",
            .threads = ceil_div<uint32_t>(grid_side(order), TRIANGULAR_TILE) * gpu::kSimdWidth,
            .slots = 1,
            .columns = 32};
  uint32_t width = 128;
  while (width > 32 && (2 * columns <= width || threadgroups(width) < tuning.threadgroups)) width /= 2;
  return {.why = "a right-hand side a thread, " + std::to_string(width) + " a threadgroup",
          .kernel = (tuning.few_registers ? "trsm_lean_" : "trsm_block_") + std::to_string(width),
          .threads = width,
          .slots = 1,
          .columns = width};
}

}  // namespace

const char* name_of(TriangularVariant variant) {
  switch (variant) {
    case TriangularVariant::empty: return "empty";
    case TriangularVariant::simd: return "simd";
    case TriangularVariant::block: return "block";
    case TriangularVariant::blocked: return "blocked";
    case TriangularVariant::torch: return "torch";
    case TriangularVariant::cpu: return "cpu";
  }
  return "";
}

TriangularPlan plan_triangular(int64_t order, int64_t columns, int64_t batch, const TriangularTuning& tuning) {
  const std::string size = times(order, order) + " with " + std::to_string(columns) + " right-hand sides: ";
  auto with_size = [&](TriangularPlan plan) {
    plan.why = size + plan.why;
    return plan;
  };
  if (order == 0 || columns == 0 || batch == 0)
    return {.variant = TriangularVariant::empty, .why = size + "X has no elements"};
  if ((columns == 1 ? tuning.vector_cpu : tuning.cpu).contain(order, batch))
    return {.variant = TriangularVariant::cpu, .why = size + faster_on_cpu(tuning.family)};
  if (order <= kSimdOrder) return with_size(simd_plan(order, columns));
  if ((columns == 1 && tuning.vector_torch.contain(order, batch)) ||
      (columns > TRIANGULAR_FEW && tuning.torch.contain(order, batch)))
    return {.variant = TriangularVariant::torch, .why = size + faster_by_torch(tuning.family)};

  const bool few = columns <= TRIANGULAR_FEW;
  const int64_t most_rows =
      few ? (columns == 1 ? TRIANGULAR_VECTOR_ORDER : TRIANGULAR_VECTORS_ORDER) : TRIANGULAR_PANEL;
  const int64_t rows = std::min(order, most_rows);
  TriangularPlan plan = few ? few_plan(rows, columns, batch, tuning) : many_plan(rows, columns, batch, tuning);
  if (order <= most_rows) {
    plan.variant = TriangularVariant::block;
    return with_size(plan);
  }
  plan.variant = TriangularVariant::blocked;
  plan.panel = grid_side(most_rows);
  plan.why = "panels of " + std::to_string(most_rows) + " rows, each solved and then subtracted from the rows below; " +
             plan.why;
  plan.update = few ? (columns == 1 ? "trsv_update_1" : "trsv_update_4") : "trsm_update";
  plan.update_threads = few ? 256 : 128;
  plan.update_rows = few ? TRIANGULAR_TILE : TRIANGULAR_UPDATE;
  plan.update_columns = few ? TRIANGULAR_FEW : TRIANGULAR_UPDATE;
  return with_size(plan);
}

}  // namespace metalcore

#include "cholesky_plan.h"

#include "../../../kernels/linalg/cholesky.h"
#include "matrices.h"

#include <algorithm>

namespace metalcore {

const gpu::Table<CholeskyTuning> cholesky_tuning("cholesky",
                                                 {{"block_rows", &CholeskyTuning::block_rows, {32, 128}},
                                                  {"torch", &CholeskyTuning::torch},
                                                  {"cpu", &CholeskyTuning::cpu, {.only_on = "mps"}}},
                                                 {
                                                     {.family = "baseline"},
                                                     {.family = "hopper", .torch = {{.above = 1023, .max_batch = 1}}},
                                                 });

namespace {

// Kernels of cholesky_simd.metal: a simdgroup takes 32 / rows matrices.
struct SimdKernel {
  const char* name;
  uint32_t rows;
};
constexpr SimdKernel kSimdKernels[] = {
    {"cholesky_simd_4", 4}, {"cholesky_simd_8", 8}, {"cholesky_simd_16", 16}, {"cholesky_simd_32", 32}};
constexpr uint32_t kSimdThreadgroup = 128;

// Kernels of cholesky_block.metal: a thread takes a tile of the lower triangle.
struct BlockKernel {
  const char* name;
  uint32_t rows;
};
constexpr BlockKernel kBlockKernels[] = {{"cholesky_block_64", 64}, {"cholesky_block_128", 128}};

constexpr uint32_t triangle_tiles(uint32_t tiles) { return tiles * (tiles + 1) / 2; }

uint32_t whole_simdgroups(uint32_t threads) { return round_up(threads, gpu::kSimdWidth); }

}  // namespace

const char* name_of(CholeskyVariant variant) {
  switch (variant) {
    case CholeskyVariant::empty: return "empty";
    case CholeskyVariant::simd: return "simd";
    case CholeskyVariant::block: return "block";
    case CholeskyVariant::blocked: return "blocked";
    case CholeskyVariant::torch: return "torch";
    case CholeskyVariant::cpu: return "cpu";
  }
  return "";
}

CholeskyPanel cholesky_panel(uint32_t n, uint32_t i) {
  const uint32_t first = i * CHOLESKY_PANEL;
  const uint32_t width = std::min<uint32_t>(CHOLESKY_PANEL, n - first);
  const uint32_t tiles = ceil_div<uint32_t>(width, CHOLESKY_TILE);
  const uint32_t below_rows = n - first - width;
  const uint32_t solving_threads = below_rows ? tiles * (CHOLESKY_SLICE / CHOLESKY_TILE) : 0;
  return {first, width, std::max<uint32_t>(1, ceil_div<uint32_t>(below_rows, CHOLESKY_SLICE)),
          whole_simdgroups(triangle_tiles(tiles) + solving_threads)};
}

CholeskyPlan plan_cholesky(int64_t n, int64_t batch, bool upper, const CholeskyTuning& tuning) {
  const std::string size = times(n, n);
  if (n == 0 || batch == 0) return {CholeskyVariant::empty, size + ": nothing to factor", "", 0, 0, 0};
  if (tuning.cpu.contain(n, batch))
    return {
        CholeskyVariant::cpu, std::to_string(batch) + " of " + size + ": " + faster_on_cpu(tuning.family), "", 0, 0, 0};
  if (!upper && tuning.torch.contain(n, batch))
    return {CholeskyVariant::torch, size + ": " + faster_by_torch(tuning.family), "", 0, 0, 0};
  for (const SimdKernel& kernel : kSimdKernels) {
    if (n > kernel.rows) continue;
    return {
        CholeskyVariant::simd, size + ": a column a lane, up to " + std::to_string(kernel.rows) + " rows in registers",
        kernel.name,           kSimdThreadgroup / kernel.rows,
        kSimdThreadgroup,      0};
  }
  for (const BlockKernel& kernel : kBlockKernels) {
    if (n > std::min(kernel.rows, tuning.block_rows)) continue;
    return {CholeskyVariant::block,
            size + ": tiles of " + times(CHOLESKY_TILE, CHOLESKY_TILE) + " in the registers of a threadgroup",
            kernel.name,
            1,
            whole_simdgroups(triangle_tiles(ceil_div<uint32_t>(grid_side(n), CHOLESKY_TILE))),
            0};
  }
  return {CholeskyVariant::blocked,
          size + " is larger than a threadgroup holds: panels of " + std::to_string(CHOLESKY_PANEL) +
              " columns, and rank-k updates of the remaining columns",
          "",
          0,
          0,
          grid_side(ceil_div<int64_t>(n, CHOLESKY_PANEL))};
}

}  // namespace metalcore

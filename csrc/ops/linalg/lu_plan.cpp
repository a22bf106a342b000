#include "lu.h"

#include "../../../kernels/linalg/lu.h"
#include "matrices.h"

#include <algorithm>
#include <optional>

namespace metalcore {

const gpu::Table<LuTuning> lu_tuning(
    "lu",
    {
        {"block_threads", &LuTuning::block_threads, {32, gpu::kMaxThreads, 32}},
        {"blocked_columns", &LuTuning::blocked_columns, {LU_PANEL, 32 * LU_PANEL, LU_PANEL}},
        {"torch", &LuTuning::torch},
        {"solve_torch", &LuTuning::solve_torch, {.calls = "linalg_lu_solve"}},
        {"cpu", &LuTuning::cpu, {.only_on = "mps"}},
        {"solve_cpu", &LuTuning::solve_cpu, {.only_on = "mps"}},
    },
    {
        {.family = "baseline"},
        {.family = "hopper",
         .blocked_columns = 64,
         .torch = {{.above = 4096, .max_batch = 3},
                   {.above = 1536, .min_batch = 2, .max_batch = 3},
                   {.above = 768, .min_batch = 160}},
         .solve_torch = {{.above = 32, .max_batch = 4}}},
    });

namespace {

constexpr uint32_t kThreadRows = 4;
constexpr uint32_t kThreadThreadgroup = 128;
constexpr uint32_t kSimdRows = 32;
constexpr uint32_t kSimdThreadgroup = 4, kComplexSimdThreadgroup = 2;  // simdgroups

// Kernels of lu_block.metal: the quads of a row that a thread holds, and the most threads with registers for them.
struct BlockKernel {
  const char* name;
  uint32_t quads, most_threads;
};
constexpr BlockKernel kBlockKernels[] = {{"lu_block_4", 4, 1024}, {"lu_block_8", 8, 512}, {"lu_block_16", 16, 512}};
// A complex number takes two registers.
constexpr BlockKernel kComplexKernels[] = {{"lu_block_complex_4", 4, 512}, {"lu_block_complex_8", 8, 512}};
constexpr uint32_t kComplexTile = 16;  // the most columns of B in lu_simd.metal's kernels of complex numbers

// The kernels of lu_panel.metal for panels that fit the registers, and the most rows.
struct PanelKernel {
  const char* name;
  uint32_t rows;
};
constexpr PanelKernel kPanelKernels[] = {{"lu_panel_512", 512},   {"lu_panel_1024", 1024}, {"lu_panel_2048", 2048},
                                         {"lu_panel_4096", 4096}, {"lu_panel_8192", 8192}, {"lu_panel_16384", 16384}};

struct Block {
  const BlockKernel* kernel;
  uint32_t row_threads, threads;
};

// The kernel that holds `columns` columns of `rows` rows with the fewest threads, if one does.
template <size_t COUNT>
std::optional<Block> block_of(const BlockKernel (&kernels)[COUNT], int64_t rows, int64_t columns,
                              uint32_t most_threads) {
  const int64_t row_threads = round_up<int64_t>(rows, gpu::kSimdWidth);
  std::optional<Block> best;
  for (const BlockKernel& kernel : kernels) {
    const int64_t threads = row_threads * ceil_div<int64_t>(columns, 4 * kernel.quads);
    if (threads <= std::min(kernel.most_threads, most_threads) && (!best || threads < best->threads))
      best = Block{&kernel, grid_side(row_threads), grid_side(threads)};
  }
  return best;
}

std::string with_b(int64_t b_columns) {
  return b_columns == 0 ? ""
                        : " with " + std::to_string(b_columns) + (b_columns == 1 ? " column of B" : " columns of B");
}

}  // namespace

const char* name_of(LuVariant variant) {
  switch (variant) {
    case LuVariant::empty: return "empty";
    case LuVariant::thread: return "thread";
    case LuVariant::simd: return "simd";
    case LuVariant::block: return "block";
    case LuVariant::blocked: return "blocked";
    case LuVariant::torch: return "torch";
    case LuVariant::cpu: return "cpu";
  }
  return "";
}

LuPanel lu_panel(uint32_t rows) {
  for (const PanelKernel& kernel : kPanelKernels)
    if (rows <= kernel.rows) return {kernel.name, LU_PANEL_THREADS};
  return {"lu_looped_panel", gpu::kMaxThreads};
}

LuPlan plan_lu(int64_t m, int64_t n, int64_t batch, int64_t b_columns, bool is_complex, const LuTuning& tuning,
               bool factored) {
  const std::string size = times(m, n) + with_b(b_columns);
  if (m == 0 || n == 0 || batch == 0) return {LuVariant::empty, size + ": nothing to factor", "", 0, 0, 0, 0};
  if ((factored ? tuning.solve_cpu : tuning.cpu).contain(std::max(m, n), batch))
    return {
        LuVariant::cpu, std::to_string(batch) + " of " + size + ": " + faster_on_cpu(tuning.family), "", 0, 0, 0, 0};
  if ((factored ? tuning.solve_torch : tuning.torch).contain(std::max(m, n), batch))
    return {LuVariant::torch,
            size + ", " + std::to_string(batch) + " of these: " + faster_by_torch(tuning.family),
            "",
            0,
            0,
            0,
            0};
  if (m == n && n <= kThreadRows && !factored && !is_complex)
    return {LuVariant::thread,
            size + ": a matrix in the registers of a thread",
            "lu_thread_" + std::to_string(n),
            kThreadThreadgroup,
            kThreadThreadgroup,
            0,
            grid_side(std::min(b_columns, n))};

  if (std::max(m, n) <= kSimdRows) {
    const uint32_t lanes = std::max(m, n) <= 8 ? 8 : std::max(m, n) <= 16 ? 16 : 32;
    uint32_t tile = 0;
    for (uint32_t columns : {4u, 8u, 16u, 32u})
      if (b_columns > 0 && tile < b_columns && columns <= lanes && !(columns == 8 && lanes > 8) &&
          (!is_complex || columns <= kComplexTile))
        tile = columns;
    const uint32_t simdgroups = is_complex ? kComplexSimdThreadgroup : kSimdThreadgroup;
    return {LuVariant::simd,
            size + ": rows of up to " + std::to_string(lanes) + " columns, one a lane",
            std::string("lu_simd_") + (is_complex ? "complex_" : "") + times(lanes, tile),
            simdgroups * gpu::kSimdWidth / lanes,
            simdgroups * gpu::kSimdWidth,
            0,
            tile};
  }
  if (factored)
    return {
        LuVariant::blocked, size + ": two triangular systems, and the rows in the order of the pivots", "", 0, 0, 0, 0};
  if (const std::optional<Block> block = is_complex ? block_of(kComplexKernels, m, n, tuning.block_threads)
                                                    : block_of(kBlockKernels, m, n, tuning.block_threads))
    return {LuVariant::block,
            size + ": in the registers of a threadgroup, " + std::to_string(4 * block->kernel->quads) +
                " columns of a row a thread",
            block->kernel->name,
            1,
            block->threads,
            block->row_threads,
            0};
  if (is_complex) return {LuVariant::cpu, too_large_for_kernels(size), "", 0, 0, 0, 0};
  return {LuVariant::blocked,
          size + " is larger than a threadgroup holds: panels of " + std::to_string(LU_PANEL) +
              " columns, in blocks of " + std::to_string(tuning.blocked_columns),
          "",
          0,
          0,
          0,
          0};
}

}  // namespace metalcore

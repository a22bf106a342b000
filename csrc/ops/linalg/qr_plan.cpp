#include "qr.h"

#include "../../../kernels/linalg/qr.h"
#include "matrices.h"

#include <algorithm>

namespace metalcore {

namespace {
constexpr uint32_t kSimdRows = 64;       // the largest kernel of qr_simd.metal
constexpr uint32_t kBlockThreads = 512;  // the most threads of qr_block.metal
constexpr uint32_t kTallColumns = 64;    // the threadgroup memory of qr_tall.metal
}  // namespace

// On mps PyTorch has a kernel of geqrf since 2.14 and none of ormqr; that of linalg_qr, since 2.12, takes memory for m
// x m entries (metalcore/mac_kernels.py).
const gpu::Table<QrTuning> qr_tuning(
    "qr",
    {
        {"simd_rows", &QrTuning::simd_rows, {0, kSimdRows}},
        {"block_threads", &QrTuning::block_threads, {0, kBlockThreads, gpu::kSimdWidth}},
        {"tall_columns", &QrTuning::tall_columns, {0, kTallColumns}},
        {"torch", &QrTuning::torch, {.calls = "linalg_qr"}},
        {"torch_rows", &QrTuning::torch_rows, {.highest = UINT32_MAX, .calls = "linalg_qr"}},
        {"geqrf_torch", &QrTuning::geqrf_torch, {.calls = "geqrf"}},
        {"householder_product_torch", &QrTuning::householder_product_torch},
        {"ormqr_torch", &QrTuning::ormqr_torch, {.calls = "ormqr"}},
        {"cpu", &QrTuning::cpu, {.only_on = "mps"}},
        {"householder_product_cpu", &QrTuning::householder_product_cpu, {.only_on = "mps"}},
        {"ormqr_cpu", &QrTuning::ormqr_cpu, {.only_on = "mps"}},
    },
    {
        {.family = "baseline"},
        // Two rows a lane and several matrices a simdgroup are more than the registers of a thread.
        {.family = "apple7", .simd_rows = 32},
        {.family = "apple8", .simd_rows = 32},
        {.family = "apple9", .simd_rows = 32},
        {.family = "apple10", .simd_rows = 32},
        {.family = "hopper",
         .torch = {{.above = 3071, .max_batch = 1}},
         .torch_rows = 32768,
         .householder_product_torch = {{.above = 128, .max_batch = 1}},
         .ormqr_torch = {{.up_to = 32, .max_batch = 1}, {.above = 128, .max_batch = 1}}},
    });

namespace {

// Kernels of qr_block.metal: `lanes` threads share a column of up to `rows` rows.
struct BlockKernel {
  uint32_t rows, lanes;
};
constexpr BlockKernel kBlockKernels[] = {{64, 4}, {128, 4}, {256, 8}, {512, 16}, {1024, 32}};

std::string name_of(const BlockKernel& kernel, bool is_complex) {
  return std::string("qr_block_") + (is_complex ? "complex_" : "") + std::to_string(kernel.rows);
}

constexpr uint32_t kSimdColumns = 32;
constexpr uint32_t kSimdThreadgroup = 4;                          // simdgroups
constexpr int64_t kPanelRows = QR_PANEL_THREADS * QR_PANEL_ROWS;  // of a panel in one threadgroup

uint32_t block_threads(const BlockKernel& kernel, int64_t columns) {
  return round_up<uint32_t>(kernel.lanes * static_cast<uint32_t>(columns), gpu::kSimdWidth);
}

bool fits(const BlockKernel& kernel, int64_t rows, int64_t columns, const QrTuning& tuning) {
  return rows <= kernel.rows && kernel.lanes * columns <= tuning.block_threads;
}

const BlockKernel* smallest_block_kernel(int64_t rows, int64_t columns, const QrTuning& tuning) {
  for (const BlockKernel& kernel : kBlockKernels)
    if (fits(kernel, rows, columns, tuning)) return &kernel;
  return nullptr;
}

const BlockKernel* tallest_block_kernel(int64_t columns, const QrTuning& tuning) {
  const BlockKernel* tallest = nullptr;
  for (const BlockKernel& kernel : kBlockKernels)
    if (fits(kernel, 1, columns, tuning)) tallest = &kernel;
  return tallest;
}

// Splits rows into as few equal blocks as possible, and then their stacked R, until there is one block.
std::vector<QrLevel> tall_levels(int64_t m, int64_t n, const BlockKernel& kernel) {
  std::vector<QrLevel> levels;
  for (int64_t rows = m;;) {
    const int64_t blocks = ceil_div<int64_t>(rows, kernel.rows);
    levels.push_back({grid_side(rows), grid_side(blocks), grid_side(ceil_div(rows, blocks)), name_of(kernel, false),
                      block_threads(kernel, n)});
    if (blocks == 1) return levels;
    rows = blocks * n;
  }
}

}  // namespace

const char* name_of(QrVariant variant) {
  switch (variant) {
    case QrVariant::empty: return "empty";
    case QrVariant::simd: return "simd";
    case QrVariant::block: return "block";
    case QrVariant::tall: return "tall";
    case QrVariant::blocked: return "blocked";
    case QrVariant::torch: return "torch";
    case QrVariant::cpu: return "cpu";
  }
  return "";
}

QrPlan plan_reflectors(int64_t m, int64_t n, int64_t batch, int64_t q_columns, bool is_complex,
                       const QrTuning& tuning) {
  const int64_t columns = std::max(n, q_columns);
  if (m == 0 || n == 0) return {QrVariant::empty, times(m, n) + " has no reflectors", "", 0, {}};

  if (tuning.cpu.contain(std::min(m, n), batch))
    return {
        QrVariant::cpu, std::to_string(batch) + " of " + times(m, n) + ": " + faster_on_cpu(tuning.family), "", 0, {}};
  const uint32_t registers = is_complex ? 2 : 1;  // that a number takes
  if (m <= std::min(kSimdRows, tuning.simd_rows) / registers && columns <= kSimdColumns) {
    const uint32_t rows = power_from_8(m), lanes = power_from_8(columns);
    return {QrVariant::simd,
            times(m, n) + ": " + std::to_string(columns) + " columns of A or Q, one a lane, with up to " +
                std::to_string(rows) + " rows in registers",
            std::string("qr_simd_") + (is_complex ? "complex_" : "") + times(rows, lanes),
            kSimdThreadgroup * gpu::kSimdWidth / lanes,
            {}};
  }
  if (const BlockKernel* kernel = smallest_block_kernel(m, columns, tuning)) {
    return {QrVariant::block,
            times(m, n) + ": " + std::to_string(columns) + " columns of A or Q in the registers of a threadgroup, " +
                std::to_string(kernel->lanes) + " lanes a column",
            "",
            1,
            {{grid_side(m), 1, grid_side(m), name_of(*kernel, is_complex), block_threads(*kernel, columns)}}};
  }
  if (is_complex) return {QrVariant::cpu, too_large_for_kernels(times(m, n)), "", 0, {}};
  const int64_t smaller = std::min(m, n);
  const bool tall = m > kPanelRows && m <= tuning.torch_rows && smaller > tuning.tall_columns;
  if (tuning.torch.contain(smaller, batch) || (batch == 1 && tall))
    return {QrVariant::torch, times(m, n) + ", a single matrix: " + faster_by_torch(tuning.family), "", 0, {}};
  return {QrVariant::blocked,
          times(m, n) + " is larger than a threadgroup holds: panels of " + std::to_string(QR_PANEL) +
              " columns, and block reflectors on the remaining columns",
          "",
          0,
          {}};
}

QrPlan plan_qr(int64_t m, int64_t n, int64_t batch, int64_t q_columns, bool is_complex, const QrTuning& tuning) {
  QrPlan plan = plan_reflectors(m, n, batch, q_columns, is_complex, tuning);
  const int64_t columns = std::max(n, q_columns);
  const BlockKernel* tallest = tallest_block_kernel(columns, tuning);
  const int64_t tall_columns = std::min(kTallColumns, tuning.tall_columns);
  if (plan.variant == QrVariant::blocked && m > kPanelRows && columns == n && n <= tall_columns && tallest &&
      tallest->rows >= 2 * n) {
    return {QrVariant::tall,
            times(m, n) + " is tall: blocks of up to " + std::to_string(tallest->rows) +
                " rows alone, and then their stacked R",
            "", 1, tall_levels(m, n, *tallest)};
  }
  return plan;
}

}  // namespace metalcore

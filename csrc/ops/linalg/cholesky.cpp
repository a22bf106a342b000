// cholesky_ex(A, upper) -> (L, info): the Cholesky factorization of matrices of any strides, float32 or complex64. It
// reads one triangle, and results are row-major. cholesky_solve(B, L, upper) -> X solves two triangular systems.
#include "../../../kernels/linalg/cholesky.h"
#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "../common/rows.h"
#include "cpu_route.h"
#include "matrices.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

// ---------------------------------------------------------------- the plan

// How a factorization runs: the kernels of kernels/linalg/cholesky_*.metal, and their grids.
enum class CholeskyVariant { empty, simd, block, blocked, torch, cpu };

struct CholeskyPlan {
  CholeskyVariant variant;
  std::string why;
  std::string kernel;  // simd, block
  uint32_t matrices_per_threadgroup;
  uint32_t threads;  // threads of a threadgroup
  uint32_t panels;   // blocked
};

struct CholeskyTuning {
  const char* family;
  // A threadgroup factors matrices of up to so many rows, and larger ones take panels. PyTorch gets no upper factors,
  // because they cost it one more copy.
  uint32_t block_rows = 128;
  // The panels form blocks of so many columns. A block's product is subtracted from what follows it at once.
  uint32_t blocked_columns = 256;
  TorchRegions torch = {}, cpu = {};
};

// Panel i of an n x n matrix, with `slices` threadgroups of `threads` threads.
struct CholeskyPanel {
  uint32_t first, width, slices, threads;
};

const gpu::Table<CholeskyTuning> cholesky_tuning(
    "cholesky",
    {{"block_rows", &CholeskyTuning::block_rows, {32, 128}},
     {"blocked_columns", &CholeskyTuning::blocked_columns, {CHOLESKY_PANEL, 32 * CHOLESKY_PANEL, CHOLESKY_PANEL}},
     {"torch", &CholeskyTuning::torch},
     {"cpu", &CholeskyTuning::cpu, {.only_on = "mps"}}},
    {
        {.family = "baseline"},
        {.family = "hopper", .torch = {{.above = 1023, .max_batch = 1}}},
    });

// Kernels of cholesky_simd.metal: a simdgroup takes 32 / rows matrices.
constexpr uint32_t kSimdRows[] = {4, 8, 16, 32};
constexpr uint32_t kSimdThreadgroup = 128;

// Kernels of cholesky_block.metal: a thread takes a tile of the lower triangle.
constexpr uint32_t kBlockRows[] = {64, 128};

constexpr uint32_t triangle_tiles(uint32_t tiles) { return tiles * (tiles + 1) / 2; }

uint32_t whole_simdgroups(uint32_t threads) { return round_up(threads, gpu::kSimdWidth); }

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

// The plan for `batch` n x n matrices.
CholeskyPlan plan_cholesky(int64_t n, int64_t batch, bool upper, bool is_complex, const CholeskyTuning& tuning) {
  const std::string size = times(n, n);
  if (n == 0 || batch == 0) return {CholeskyVariant::empty, size + ": nothing to factor", "", 0, 0, 0};
  if (tuning.cpu.contain(n, batch))
    return {
        CholeskyVariant::cpu, std::to_string(batch) + " of " + size + ": " + faster_on_cpu(tuning.family), "", 0, 0, 0};
  if (!upper && tuning.torch.contain(n, batch))
    return {CholeskyVariant::torch, size + ": " + faster_by_torch(tuning.family), "", 0, 0, 0};
  const std::string number = is_complex ? "complex_" : "";
  for (const uint32_t rows : kSimdRows) {
    if (n > rows) continue;
    return {CholeskyVariant::simd,
            size + ": a column a lane, up to " + std::to_string(rows) + " rows in registers",
            "cholesky_simd_" + number + std::to_string(rows),
            kSimdThreadgroup / rows,
            kSimdThreadgroup,
            0};
  }
  for (const uint32_t rows : kBlockRows) {
    if (n > (is_complex ? rows : std::min(rows, tuning.block_rows))) continue;
    return {CholeskyVariant::block,
            size + ": tiles of " + times(CHOLESKY_TILE, CHOLESKY_TILE) + " in the registers of a threadgroup",
            "cholesky_block_" + number + std::to_string(rows),
            1,
            whole_simdgroups(triangle_tiles(ceil_div<uint32_t>(grid_side(n), CHOLESKY_TILE))),
            0};
  }
  if (is_complex) return {CholeskyVariant::cpu, too_large_for_kernels(size), "", 0, 0, 0};
  return {CholeskyVariant::blocked,
          size + " is larger than a threadgroup holds: panels of " + std::to_string(CHOLESKY_PANEL) +
              " columns, in blocks of " + std::to_string(tuning.blocked_columns) +
              ", and rank-k updates of the remaining columns",
          "",
          0,
          0,
          grid_side(ceil_div<int64_t>(n, CHOLESKY_PANEL))};
}

// The kernels know only L. For U, which is Lᵀ, they get the strides of rows and columns in each other's place.
struct Strides {
  int64_t row, column;
};
Strides strides_of(int64_t row, int64_t column, bool upper) {
  return upper ? Strides{column, row} : Strides{row, column};
}

// How the kernels may read and write the tensor's matrices: one of CHOLESKY_ELEMENTS, _ROWS and _COLUMNS.
uint32_t access_of(const Tensor& tensor, int64_t n, int64_t batch_stride, Strides strides) {
  const bool rows = strides.column == 1, columns = strides.row == 1;
  if (n % CHOLESKY_TILE != 0 || !(rows || columns)) return CHOLESKY_ELEMENTS;
  if (!aligned16(tensor, batch_stride, rows ? strides.row : strides.column)) return CHOLESKY_ELEMENTS;
  return rows ? CHOLESKY_ROWS : CHOLESKY_COLUMNS;
}

void factor_whole(const CholeskyPlan& plan, const Matrices& a, const Tensor& l, const Tensor& info, bool upper) {
  const Strides a_strides = strides_of(a.row_stride, a.column_stride, upper);
  const Strides l_strides = strides_of(a.rows, 1, upper);
  CholeskyParams params{.a_batch = a.batch_stride,
                        .a_row = a_strides.row,
                        .a_column = a_strides.column,
                        .l_batch = a.rows * a.rows,
                        .l_row = l_strides.row,
                        .l_column = l_strides.column,
                        .matrices = grid_side(a.batch),
                        .n = grid_side(a.rows),
                        .a_vectors = access_of(a.tensor, a.rows, a.batch_stride, a_strides),
                        .l_vectors = access_of(l, a.rows, a.rows * a.rows, l_strides)};
  gpu::record(l, [&](gpu::Recording& recording) {
    const auto entries = static_cast<double>(a.rows * a.rows);
    const double size = l.element_size() / 4.0;  // a complex product has four real ones
    gpu::in_pieces(recording, a.batch, {size * size * entries * static_cast<double>(a.rows), 8 * size * entries},
                   [&](const gpu::Piece& piece) {
                     params.matrices = grid_side(piece.count);
                     recording.kernel(plan.kernel).buffer(0, piece.of(a.tensor, a.batch_stride));
                     recording.buffer(1, piece.of(l, a.rows * a.rows)).buffer(2, piece.of(info, 1)).bytes(3, params);
                     recording.work(piece.work.flops, piece.work.bytes);
                     recording.dispatch_threadgroups({ceil_div(params.matrices, plan.matrices_per_threadgroup)},
                                                     {plan.threads});
                   });
  });
}

gpu::BufferView from_element(const Tensor& tensor, int64_t element) {
  gpu::BufferView view = gpu::view_of(tensor);
  view.offset += element * sizeof(float);
  view.span -= element * sizeof(float);
  return view;
}

// LAPACK's right-looking potrf in two levels. After a panel, its rows times their transpose are subtracted from the
// rest of its block, and after a block from the matrix below and right of the block.
void factor_blocked(const CholeskyPlan& plan, const Matrices& a, const Tensor& l, const Tensor& info, bool upper,
                    uint32_t blocked_columns) {
  const uint32_t n = grid_side(a.rows), batch = grid_side(a.batch);
  const uint32_t rows = grid_side(a.batch * a.rows);
  const Strides l_strides = strides_of(n, 1, upper);
  const uint32_t l_access = access_of(l, n, int64_t{n} * n, l_strides);
  const Tensor factors = new_tensor({a.batch, a.rows, CHOLESKY_PANEL}, ScalarType::Float, l);

  gpu::record(l, [&](gpu::Recording& recording) {
    // Subtracts the product of columns from `first` up to `next`, in columns from `next` up to `end`.
    const auto subtract = [&](uint32_t first, uint32_t next, uint32_t end) {
      const gpu::BufferView rest = from_element(l, int64_t{next} * n + next);
      record_syrk(recording, from_element(l, next * l_strides.row + first * l_strides.column), rest, rest,
                  {.a_batch = int64_t{n} * n,
                   .a_row = l_strides.row,
                   .a_column = l_strides.column,
                   .c_batch = int64_t{n} * n,
                   .c_row = n,
                   .c_column = 1,
                   .result_batch = int64_t{n} * n,
                   .result_row = n,
                   .n = n - next,
                   .k = next - first,
                   .as_float4 = l_access != CHOLESKY_ELEMENTS,
                   .tiles = 0,
                   .across = ceil_div<uint32_t>(end - next, SYRK_TILE),
                   .lower = upper ? SYRK_LEAVE : SYRK_WRITE,
                   .upper = upper ? SYRK_WRITE : SYRK_LEAVE,
                   .alpha = -1.0f,
                   .beta = 1.0f},
                  batch);
    };
    recording.kernel("cholesky_triangle").buffer(0, a.tensor).buffer(1, l);
    recording.bytes(2, CholeskyTriangleParams{a.batch_stride, a.row_stride, a.column_stride, n, upper});
    recording.dispatch_threadgroups({rows}, {CHOLESKY_ROW_THREADS});
    for (uint32_t i = 0; i < plan.panels; ++i) {
      const CholeskyPanel panel = cholesky_panel(n, i);
      const CholeskyPanelParams p{l_strides.row, l_strides.column, l_access, n, panel.first, panel.width, panel.slices};
      recording.kernel("cholesky_panel").buffer(0, l).buffer(1, factors).buffer(2, info).bytes(3, p);
      const double entries = 1.0 * batch * (n - panel.first) * panel.width;
      recording.work(entries * panel.width, 8 * entries);
      recording.dispatch_threadgroups({grid_side(int64_t{batch} * panel.slices)}, {panel.threads});
      const uint32_t next = panel.first + panel.width, block = panel.first / blocked_columns * blocked_columns;
      const uint32_t block_end = std::min(block + blocked_columns, n);
      if (next < block_end)
        subtract(panel.first, next, block_end);
      else if (next < n)
        subtract(block, next, n);
    }
    recording.kernel("cholesky_diagonal").buffer(0, factors).buffer(1, l);
    recording.bytes(2, CholeskyPanelParams{l_strides.row, l_strides.column, l_access, n, 0, 0, 0});
    recording.dispatch_threadgroups({rows}, {CHOLESKY_PANEL});
  });
}

}  // namespace

std::tuple<Tensor, Tensor> cholesky_ex(const Tensor& input, bool upper) {
  const MatrixShape shape = check_square_of_numbers("cholesky", input);
  const CholeskyTuning& tuning = cholesky_tuning(input);
  const CholeskyPlan plan = plan_cholesky(shape.rows, shape.batch, upper, is_complex(input), tuning);
  gpu::note_plan("cholesky", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant)) {
    const auto [l, info] = call_left<2>(plan.variant, "aten::linalg_cholesky_ex", input, upper, false);
    return {as_contiguous(l), info};
  }
  const Tensor l = new_like(input);
  Tensor info = new_tensor(batch_sizes(input, {}), ScalarType::Int, input);
  if (plan.variant == CholeskyVariant::empty) {
    if (info.numel() > 0) torch::stable::zero_(info);
  } else if (plan.variant == CholeskyVariant::blocked) {
    factor_blocked(plan, matrices(input), l, info, upper, tuning.blocked_columns);
  } else {
    factor_whole(plan, matrices(input), l, info, upper);
  }
  return {l, info};
}

namespace {

// A is L Lᴴ, or Uᴴ U: the left factor's system comes first.
Tensor cholesky_solve(const Tensor& b, const Tensor& factor, bool upper) {
  check(b.dim() >= 2, "b should have at least 2 dimensions, but has ", b.dim(), " dimensions instead");
  check(factor.dim() >= 2, "u should have at least 2 dimensions, but has ", factor.dim(), " dimensions instead");
  check(factor.size(-1) == factor.size(-2), "A must be batches of square matrices, but they are ", factor.size(-2),
        " by ", factor.size(-1), " matrices");
  check(factor.size(-1) == b.size(-2), "Incompatible matrix sizes for cholesky_solve: each A matrix is ",
        factor.size(-1), " by ", factor.size(-1), " but each b matrix is ", b.size(-2), " by ", b.size(-1));
  const Tensor transpose =
      transposed(is_complex(factor) ? call_torch<1>("aten::conj_physical", "", factor)[0] : factor);
  const Tensor y = solve_triangular(upper ? transpose : factor, b, false, true, false);
  return solve_triangular(upper ? factor : transpose, y, true, true, false);
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("cholesky_ex(Tensor A, bool upper) -> (Tensor, Tensor)");
  m.def("cholesky_solve(Tensor B, Tensor L, bool upper) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::cholesky_ex>("cholesky_ex");
  m.impl<&metalcore::cholesky_solve>("cholesky_solve");
}

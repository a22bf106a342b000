// solve_triangular(A, B, upper, left, unitriangular) -> X, for triangular matrices of any strides, float32 or
// complex64.
#include "../../../kernels/linalg/triangular.h"
#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "cpu_route.h"
#include "matrices.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace metalcore {
namespace {

// ---------------------------------------------------------------- the plan

// How systems are solved: the kernels of kernels/linalg/triangular_*.metal, and their grids.
enum class TriangularVariant { empty, simd, block, blocked, torch, cpu };

struct TriangularTuning {
  const char* family;
  // These three are for systems of order above 32. Where 32 right-hand sides per threadgroup make fewer than
  // panel_threadgroups threadgroups, the simdgroups of a threadgroup share the rows. Otherwise a threadgroup takes more
  // right-hand sides, as long as `threadgroups` threadgroups remain. Systems with one right-hand side get many threads
  // each where the batch is smaller than vector_batch.
  // On Apple GPUs a threadgroup that does not share rows is one simdgroup; two threadgroups for each core even out
  // their load; and two of the largest threadgroups for a vector (17 simdgroups) keep a core busy.
  gpu::Count panel_threadgroups = gpu::filling_threadgroups(1);
  gpu::Count threadgroups = gpu::per_core(2);
  gpu::Count vector_batch = gpu::per_core(2);
  bool few_registers = false;  // whether threads hold nothing of the tile that they use next
  // Systems with more than four right-hand sides, and systems with one. PyTorch takes none with two to four.
  TorchRegions torch = {}, vector_torch = {};
  // Systems with two right-hand sides and more, and systems with one.
  TorchRegions cpu = {}, vector_cpu = {};
};
struct TriangularPlan {
  TriangularVariant variant;
  std::string why;
  std::string kernel;  // solves a system, or a panel of one
  uint32_t threads;    // threads of a threadgroup
  uint32_t slots;      // systems, or column tiles of systems, per threadgroup
  uint32_t columns;    // columns of a slot
  // The blocked variant solves `panel` rows at a time, and the kernel `update` subtracts them from the rows below.
  uint32_t panel;
  const char* update;
  uint32_t update_threads;               // threads of a threadgroup
  uint32_t update_rows, update_columns;  // rows and columns per threadgroup
};

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

constexpr uint32_t kSimdOrder = 32;

// The first of 8, 16 and 32 that is at least n, or else 32.
uint32_t power_to_32(int64_t n) { return n <= 8 ? 8 : n <= 16 ? 16 : 32; }

// Simdgroups in a threadgroup. The threadgroup memory of triangular_simd.metal limits them.
uint32_t simdgroups(uint32_t order, uint32_t lanes) { return order == 32 ? lanes / 8 : 4; }

TriangularPlan lanes_plan(const char* kernel, uint32_t rows, uint32_t lanes, uint32_t threads) {
  return {.variant = TriangularVariant::simd,
          .why = "a right-hand side a lane, " + std::to_string(lanes) + " lanes a system",
          .kernel = kernel + times(rows, lanes),
          .threads = threads,
          .slots = threads / lanes,
          .columns = lanes};
}

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
  const uint32_t lanes = power_to_32(columns);
  return lanes_plan("trsm_simd_", rows, lanes, simdgroups(rows, lanes) * gpu::kSimdWidth);
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

// Complex systems. Threadgroup memory holds half as many triangles, and threads hold half as many rows.
TriangularPlan complex_plan(int64_t order, int64_t columns, int64_t batch, const TriangularTuning& tuning) {
  if (order > kSimdOrder) {
    TriangularPlan plan = many_plan(TRIANGULAR_PANEL + order, columns, batch, tuning);
    plan.kernel = "trsm_block_complex_" + std::to_string(plan.threads);
    return plan;
  }
  const uint32_t rows = power_to_32(order);
  const uint32_t lanes = columns > 16 ? 32 : rows == 32 ? 16 : columns > 8 ? 32 : 8;
  const uint32_t threads = gpu::kSimdWidth * (rows == 32 ? lanes / 16 : rows == 16 && lanes == 8 ? 2 : 4);
  return lanes_plan("trsm_simd_complex_", rows, lanes, threads);
}

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

// The plan for `batch` systems of `order` equations with `columns` right-hand sides.
TriangularPlan plan_triangular(int64_t order, int64_t columns, int64_t batch, bool is_complex,
                               const TriangularTuning& tuning) {
  const std::string size = times(order, order) + " with " + std::to_string(columns) + " right-hand sides: ";
  auto with_size = [&](TriangularPlan plan) {
    plan.why = size + plan.why;
    return plan;
  };
  if (order == 0 || columns == 0 || batch == 0)
    return {.variant = TriangularVariant::empty, .why = size + "X has no elements"};
  if ((columns == 1 ? tuning.vector_cpu : tuning.cpu).contain(order, batch))
    return {.variant = TriangularVariant::cpu, .why = size + faster_on_cpu(tuning.family)};
  if (order <= kSimdOrder)
    return with_size(is_complex ? complex_plan(order, columns, batch, tuning) : simd_plan(order, columns));
  if ((columns == 1 && tuning.vector_torch.contain(order, batch)) ||
      (columns > TRIANGULAR_FEW && tuning.torch.contain(order, batch)))
    return {.variant = TriangularVariant::torch, .why = size + faster_by_torch(tuning.family)};

  if (is_complex) {
    TriangularPlan plan = complex_plan(order, columns, batch, tuning);
    plan.variant = TriangularVariant::block;
    return with_size(plan);
  }
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

// The shape of X. The errors are PyTorch's.
std::vector<int64_t> check_shapes(const std::vector<int64_t>& a, const std::vector<int64_t>& b, bool left) {
  const MatrixShape A = check_square("solve_triangular", a);
  check(b.size() >= 2, "linalg.solve_triangular: The input tensor B must have at least 2 dimensions.");
  const MatrixShape B = matrix_shape(b);
  check(A.rows == (left ? B.rows : B.columns),
        "linalg.solve_triangular: Incompatible shapes of A and B for the equation ", left ? "AX = B" : "XA = B", " (",
        times(A.rows, A.columns), " and ", times(B.rows, B.columns), ")");
  std::vector<int64_t> sizes = broadcast_batches(b, a);
  sizes.insert(sizes.end(), {B.rows, B.columns});
  return sizes;
}

// The matrices of a tensor, broadcast to the batch of the shape `target`.
Matrices broadcast(const Tensor& tensor, const std::vector<int64_t>& target) {
  const std::vector<int64_t> sizes = sizes_of(tensor);
  std::vector<int64_t> expanded = target;
  expanded[target.size() - 2] = sizes[sizes.size() - 2];
  expanded[target.size() - 1] = sizes[sizes.size() - 1];
  if (sizes == expanded) return matrices(tensor);
  if (matrix_shape(sizes).batch == 1) {
    Matrices one = matrices(tensor);
    one.batch_stride = 0;
    return one;
  }
  return matrices(call_torch<1>("aten::expand", "", tensor, expanded, false)[0]);
}

StridedMatrices strided(int64_t first, int64_t batch, int64_t row, int64_t column) {
  return {first, batch, row, column, std::abs(column) <= std::abs(row)};
}

StridedMatrices transposed(const StridedMatrices& m) { return strided(m.first, m.batch, m.column, m.row); }

// The part of each matrix that begins at (row, column).
StridedMatrices from(const StridedMatrices& m, int64_t row, int64_t column) {
  StridedMatrices part = m;
  part.first += row * m.row + column * m.column;
  return part;
}

// The system that the kernels solve: A is lower triangular and on the left. X A = B becomes Aᵀ Xᵀ = Bᵀ. An upper
// triangle becomes a lower one when its rows and columns are read backwards, and the rows of X and B with them.
struct Problem {
  Tensor a, b, x;
  TriangularParams params;
};

StridedMatrices backwards(StridedMatrices m, int64_t rows, int64_t columns, bool both_dimensions) {
  m.first += (rows - 1) * m.row + (both_dimensions ? (columns - 1) * m.column : 0);
  return strided(m.first, m.batch, -m.row, both_dimensions ? -m.column : m.column);
}

Problem problem_of(const Tensor& a, const Tensor& b, const Tensor& x, bool upper, bool left, bool unitriangular) {
  const std::vector<int64_t> sizes = sizes_of(x);
  const Matrices A = broadcast(a, sizes), B = broadcast(b, sizes), X = matrices(x);
  const int64_t n = A.rows, columns = left ? X.columns : X.rows;
  auto view = [&](const Matrices& m) {
    const StridedMatrices s = strided(0, m.batch_stride, m.row_stride, m.column_stride);
    return left ? s : transposed(s);
  };
  TriangularParams p{.a = view(A),
                     .b = view(B),
                     .x = view(X),
                     .matrices = grid_side(X.batch),
                     .order = grid_side(n),
                     .columns = grid_side(columns),
                     .column_tiles = 1,
                     .unit = unitriangular};
  if (upper == left) {
    p.a = backwards(p.a, n, n, true);
    p.b = backwards(p.b, n, columns, false);
    p.x = backwards(p.x, n, columns, false);
  }
  return {A.tensor, B.tensor, X.tensor, p};
}

void solve(gpu::Recording& recording, const TriangularPlan& plan, const Problem& problem, const Tensor& b,
           TriangularParams params) {
  params.column_tiles = ceil_div(params.columns, plan.columns);
  const double each = problem.x.element_size() / 4.0;
  const double flops = each * each * params.order * params.order * params.columns;
  const double bytes = 4.0 * each * params.order * (params.order * 0.5 * params.column_tiles + 2.0 * params.columns);
  gpu::in_pieces(recording, params.matrices, {flops, bytes}, [&](const gpu::Piece& piece) {
    TriangularParams own = params;
    own.matrices = grid_side(piece.count);
    for (StridedMatrices* m : {&own.a, &own.b, &own.x}) m->first += piece.first * m->batch;
    recording.kernel(plan.kernel).buffer(0, problem.a).buffer(1, b).buffer(2, problem.x).bytes(3, own);
    const int64_t slots = piece.count * params.column_tiles;
    recording.work(piece.work.flops, piece.work.bytes);
    recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(slots, plan.slots))}, {plan.threads});
  });
}

void update(gpu::Recording& recording, const TriangularPlan& plan, const Problem& problem, const Tensor& b,
            TriangularUpdateParams params) {
  params.row_tiles = ceil_div(params.rows, plan.update_rows);
  params.column_tiles = ceil_div(params.columns, plan.update_columns);
  recording.kernel(plan.update)
      .buffer(0, problem.a)
      .buffer(1, problem.x)
      .buffer(2, b)
      .buffer(3, problem.x)
      .bytes(4, params);
  const double entries = 1.0 * problem.params.matrices * params.rows * params.columns;
  recording.work(2 * entries * params.depth, 8 * entries);
  recording.dispatch_threadgroups(
      {grid_side(int64_t{problem.params.matrices} * params.row_tiles * params.column_tiles)}, {plan.update_threads});
}

// The right-looking variant solves a panel of rows, and then subtracts it from all rows below. The rows are in B for
// the first panel and in X for the others.
void blocked(gpu::Recording& recording, const TriangularPlan& plan, const Problem& problem) {
  const TriangularParams& system = problem.params;
  for (uint32_t first = 0; first < system.order; first += plan.panel) {
    const uint32_t end = std::min(first + plan.panel, system.order);
    const Tensor& b = first == 0 ? problem.b : problem.x;
    const StridedMatrices& rows = first == 0 ? system.b : system.x;
    TriangularParams panel = system;
    panel.a = from(system.a, first, first);
    panel.b = from(rows, first, 0);
    panel.x = from(system.x, first, 0);
    panel.order = end - first;
    solve(recording, plan, problem, b, panel);
    if (end == system.order) break;
    update(recording, plan, problem, b,
           {.a = from(system.a, end, first),
            .solved = transposed(panel.x),
            .b = from(rows, end, 0),
            .x = from(system.x, end, 0),
            .rows = system.order - end,
            .depth = panel.order,
            .columns = system.columns});
  }
}

}  // namespace

Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left, bool unitriangular) {
  check_number("solve_triangular", "A", a);
  check_same_dtype("solve_triangular", "B", b, a);
  check_same_device("solve_triangular", "B", b, a);
  const std::vector<int64_t> sizes = check_shapes(sizes_of(a), sizes_of(b), left);
  const MatrixShape shape = matrix_shape(sizes);
  const TriangularPlan plan = plan_triangular(left ? shape.rows : shape.columns, left ? shape.columns : shape.rows,
                                              shape.batch, is_complex(a), triangular_tuning(a));
  gpu::note_plan("solve_triangular", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant))
    return as_contiguous(
        call_left<1>(plan.variant, "aten::linalg_solve_triangular", a, b, upper, left, unitriangular)[0]);
  const Tensor x = new_tensor(sizes, a.scalar_type(), a);
  if (plan.variant == TriangularVariant::empty) return x;
  const Problem problem = problem_of(a, b, x, upper, left, unitriangular);
  gpu::record(x, [&](gpu::Recording& recording) {
    if (plan.variant == TriangularVariant::blocked)
      blocked(recording, plan, problem);
    else
      solve(recording, plan, problem, problem.b, problem.params);
  });
  return x;
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("solve_triangular(Tensor A, Tensor B, bool upper, bool left, bool unitriangular) -> Tensor");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::solve_triangular>("solve_triangular"); }

// ldl_factor_ex(A, hermitian) -> (LD, pivots, info): A = L D Lᵀ or L D Lᴴ from A's lower triangle, float32 or
// complex64, of any strides. ldl_solve(LD, pivots, B, hermitian) -> X solves A X = B with it. Results are row-major.
#include "../../../kernels/linalg/ldl.h"

#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "cpu_route.h"
#include "matrices.h"

#include <string>
#include <tuple>

namespace metalcore {
namespace {

// Apple's region is an estimate. The steps of an n x n matrix have about nine barriers of a threadgroup, for which 0.5
// µs each is assumed, and 2 n³ / 3 bytes of a threadgroup's traffic at 30 GB/s: 4 ms for n = 512, and 24 ms for n =
// 1024. LAPACK needs about 2 ms and 8 ms.
constexpr TorchRegions kSlowOnApple = {{.above = 256, .max_batch = 4}};

// Measured on an H200 beside PyTorch's op (cuSOLVER), which works on one matrix after the other.
constexpr TorchRegions kSlowOnHopper = {{.above = 767, .max_batch = 1}};

const gpu::Table<RouteTuning> ldl_tuning("ldl_factor",
                                         {{"torch", &RouteTuning::torch, {.only_on = "cuda"}},
                                          {"cpu", &RouteTuning::cpu, {.only_on = "mps"}}},
                                         {{.family = "baseline"},
                                          {.family = "apple7", .cpu = kSlowOnApple},
                                          {.family = "apple8", .cpu = kSlowOnApple},
                                          {.family = "apple9", .cpu = kSlowOnApple},
                                          {.family = "apple10", .cpu = kSlowOnApple},
                                          {.family = "hopper", .torch = kSlowOnHopper}});

// PyTorch's op on a GPU takes no Hermitian matrices.
SizePlan plan_ldl(int64_t n, int64_t batch, bool is_complex, bool hermitian, const RouteTuning& tuning) {
  const std::string name = is_complex ? "ldl_factor_complex" : "ldl_factor";
  const uint32_t simdgroups = is_complex ? LDL_COMPLEX_SIMDGROUPS : LDL_SIMDGROUPS;
  return plan_by_size(n, batch, " has no entries", tuning, !(is_complex && hermitian),
                      {{LDL_SIMD, SizeVariant::simd, "by a simdgroup, in threadgroup memory", name + "_simd",
                        simdgroups, 32 * simdgroups},
                       {is_complex ? LDL_COMPLEX_BLOCK : LDL_BLOCK, SizeVariant::block,
                        "by a threadgroup, in its memory", name + "_block", 1, LDL_BLOCK_THREADS},
                       {LDL_DEVICE, SizeVariant::device, "by a threadgroup, in device memory", name + "_device", 1,
                        LDL_DEVICE_THREADS}});
}

std::tuple<Tensor, Tensor, Tensor> ldl_factor_ex(const Tensor& input, bool hermitian) {
  const MatrixShape s = check_square_of_numbers("torch.linalg.ldl_factor_ex", input);
  const SizePlan plan = plan_ldl(s.rows, s.batch, is_complex(input), hermitian, ldl_tuning(input));
  gpu::note_plan("ldl_factor", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant)) {
    const auto [ld, pivots, info] = call_left<3>(plan.variant, "aten::linalg_ldl_factor_ex", input, hermitian, false);
    return {as_contiguous(ld), pivots, info};
  }
  const Tensor ld = new_like(input), pivots = new_tensor(batch_sizes(input, {s.rows}), ScalarType::Int, input);
  Tensor info = new_tensor(batch_sizes(input, {}), ScalarType::Int, input);
  if (plan.variant == SizeVariant::empty) {
    if (info.numel() > 0) torch::stable::zero_(info);
    return {ld, pivots, info};
  }
  const Matrices a = matrices(input);
  LdlParams params{a.batch_stride, a.row_stride, a.column_stride, 0, grid_side(s.rows), hermitian};
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    const auto entries = static_cast<double>(s.rows * s.rows), size = input.element_size() / 4.0;
    const double flops = size * size * entries * static_cast<double>(s.rows) / 3;
    gpu::in_pieces(recording, s.batch, {flops, 8 * size * entries}, [&](const gpu::Piece& piece) {
      params.matrices = grid_side(piece.count);
      recording.kernel(plan.kernel).buffer(0, piece.of(a.tensor, a.batch_stride));
      recording.buffer(1, piece.of(ld, s.rows * s.rows)).buffer(2, piece.of(pivots, s.rows));
      recording.buffer(3, piece.of(info, 1)).bytes(4, params);
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({ceil_div(params.matrices, plan.matrices_per_threadgroup)}, {plan.threads});
    });
  });
  return {ld, pivots, info};
}

// The batches are equal.
Tensor ldl_solve(const Tensor& factors, const Tensor& pivots, const Tensor& right, bool hermitian) {
  const MatrixShape s = check_square_of_numbers("torch.linalg.ldl_solve", factors);
  check_number("torch.linalg.ldl_solve", "B", right);
  check(right.dim() == factors.dim() && pivots.dim() + 1 == factors.dim() && right.size(-2) == s.rows &&
            pivots.size(-1) == s.rows,
        "metalcore::ldl_solve: LD, pivots and B must be (*, n, n), (*, n) and (*, n, k)");
  check(pivots.scalar_type() == ScalarType::Int, "metalcore::ldl_solve: pivots must be int32");
  const int64_t columns = right.size(-1);
  const Tensor x = new_like(right);
  const bool is_empty = s.batch == 0 || s.rows == 0 || columns == 0, in_simdgroup = s.rows <= 2 * LDL_SIMD;
  gpu::note_plan("ldl_solve",
                 is_empty       ? "empty"
                 : in_simdgroup ? "simd"
                                : "block",
                 [&] {
                   return times(s.rows, columns) + ": a " + (in_simdgroup ? "simdgroup" : "threadgroup") + " takes " +
                          std::to_string(LDL_TILE) + " columns of B";
                 });
  if (is_empty) return x;
  const Matrices ld = matrices(factors), b = matrices(right);
  const Tensor rows = as_contiguous(pivots);
  const uint32_t tiles = grid_side(ceil_div<int64_t>(columns, LDL_TILE));
  const LdlSolveParams params{ld.batch_stride,    ld.row_stride,   ld.column_stride,   b.batch_stride,
                              b.row_stride,       b.column_stride, grid_side(s.batch), grid_side(s.rows),
                              grid_side(columns), tiles,           hermitian};
  const std::string kernel =
      std::string(is_complex(right) ? "ldl_solve_complex" : "ldl_solve") + (in_simdgroup ? "_simd" : "_block");
  gpu::record(x, [&](gpu::Recording& recording) {
    recording.kernel(kernel).buffer(0, ld.tensor).buffer(1, rows).buffer(2, b.tensor).buffer(3, x).bytes(4, params);
    const double size = right.element_size() / 4.0, entries = 1.0 * s.batch * s.rows * columns;
    recording.work(2 * size * size * entries * s.rows, 4 * size * (2 * entries + 1.0 * s.batch * s.rows * s.rows));
    recording.dispatch_threadgroups({grid_side(s.batch * tiles)}, {in_simdgroup ? 32u : LDL_DEVICE_THREADS});
  });
  return x;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("ldl_factor_ex(Tensor A, bool hermitian) -> (Tensor, Tensor, Tensor)");
  m.def("ldl_solve(Tensor LD, Tensor pivots, Tensor B, bool hermitian) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::ldl_factor_ex>("ldl_factor_ex");
  m.impl<&metalcore::ldl_solve>("ldl_solve");
}

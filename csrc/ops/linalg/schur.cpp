// schur(A, sweeps) -> (T, Z): A = Z T Zᴴ of general matrices, float32 or complex64, of any strides. T is the Schur
// form, or without sweeps the Hessenberg form. T is row-major, and Z column-major.
#include "../../../kernels/linalg/eig.h"

#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "matrices.h"

#include <string>
#include <tuple>

namespace metalcore {
namespace {

struct SchurPlan {
  const char* variant;
  std::string why, kernel;
  uint32_t matrices_per_threadgroup, threads;
};

SchurPlan plan_schur(int64_t n, int64_t batch, bool is_complex) {
  const std::string size = times(n, n), name = is_complex ? "schur_complex" : "schur";
  const uint32_t simdgroups = is_complex ? EIG_COMPLEX_SIMDGROUPS : EIG_SIMDGROUPS;
  if (batch == 0 || n == 0) return {"empty", size + " has no entries", "", 0, 0};
  if (n <= 32)
    return {"simd", size + ": by a simdgroup, in threadgroup memory", name + "_simd", simdgroups, 32 * simdgroups};
  if (n <= (is_complex ? EIG_COMPLEX_BLOCK : EIG_BLOCK))
    return {"block", size + ": by a threadgroup, in its memory", name + "_block", 1, EIG_BLOCK_THREADS};
  return {"device", size + ": by a threadgroup, in device memory", name + "_device", 1, EIG_DEVICE_THREADS};
}

}  // namespace

std::tuple<Tensor, Tensor> schur(const Tensor& input, bool sweeps) {
  const bool is_complex = metalcore::is_complex(input);
  const MatrixShape s = check_square_of_numbers("schur", input);
  check(s.rows <= EIG_DEVICE, "metalcore::schur: A may have up to ", EIG_DEVICE, " rows, and has ", s.rows);
  const SchurPlan plan = plan_schur(s.rows, s.batch, is_complex);
  gpu::note_plan("schur", plan.variant, [&] { return plan.why; });
  const Tensor t = new_like(input), z = new_like(input);
  if (plan.threads == 0) return {t, transposed(z)};
  const Matrices a = matrices(input);
  SchurParams params{{a.batch_stride, a.row_stride, a.column_stride, 0, grid_side(s.rows)}, sweeps};
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    const auto entries = static_cast<double>(s.rows * s.rows), size = input.element_size() / 4.0;
    // Arithmetic as LAPACK's working notes count it: gehrd and orghr, and hseqr with Z.
    const double flops = size * size * (sweeps ? 25.0 : 14.0 / 3) * entries * static_cast<double>(s.rows);
    gpu::in_pieces(recording, s.batch, {flops, 12.0 * size * entries}, [&](const gpu::Piece& piece) {
      params.eig.matrices = grid_side(piece.count);
      recording.kernel(plan.kernel).buffer(0, piece.of(a.tensor, a.batch_stride));
      recording.buffer(1, piece.of(z, s.rows * s.rows)).buffer(2, piece.of(t, s.rows * s.rows)).bytes(3, params);
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({ceil_div(params.eig.matrices, plan.matrices_per_threadgroup)}, {plan.threads});
    });
  });
  return {t, transposed(z)};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) { m.def("schur(Tensor A, bool sweeps) -> (Tensor, Tensor)"); }

METALCORE_KERNELS(m) { m.impl<&metalcore::schur>("schur"); }

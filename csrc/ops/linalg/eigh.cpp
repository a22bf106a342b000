// eigh(A, UPLO, compute_v) -> (L, V): eigenvalues and eigenvectors of symmetric float32 matrices or Hermitian
// complex64 ones, of any strides. Results are row-major.
#include "../../../kernels/linalg/spectral.h"

#include "../../gpu/cost.h"
#include "cpu_route.h"
#include "jacobi.h"
#include "matrices.h"
#include "tridiagonal.h"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

bool is_upper(const std::string& uplo) {
  const bool upper = uplo == "U" || uplo == "u";
  check(upper || uplo == "L" || uplo == "l", "Expected UPLO argument to be 'L' or 'U', but got ", uplo);
  return upper;
}

// By tridiagonal matrices. Each dispatch handles all matrices.
std::tuple<Tensor, Tensor> by_tridiagonal(const Tensor& a, bool upper, bool compute_v) {
  const std::vector<int64_t> sizes = sizes_of(a), values = batch_sizes(a, {a.size(-1)});
  const Tridiagonal t = tridiagonalize(a, upper);
  const auto [l, v] = eigh_tridiagonal(t.diagonal, t.beside, compute_v);
  unscale(l, t.scales);
  const Tensor eigenvalues = in_shape(l, {values.data(), values.size()});
  if (!compute_v) return {eigenvalues, new_tensor({0}, a.scalar_type(), a)};
  return {eigenvalues, in_shape(apply_reflectors(t, v), {sizes.data(), sizes.size()})};
}

}  // namespace

std::tuple<Tensor, Tensor> eigh(const Tensor& input, const std::string& uplo, bool compute_v) {
  const MatrixShape s = check_square_of_numbers("eigh", input);
  const bool upper = is_upper(uplo);
  const JacobiPlan plan = plan_eigh(s.rows, s.batch, compute_v, is_complex(input), jacobi_tuning(input));
  gpu::note_plan("eigh", name_of(plan.variant), [&] { return plan.why; });
  if (plan.variant == JacobiVariant::torch) {
    auto [l, v] = call_torch<2>("aten::_linalg_eigh", "", input, uplo, compute_v);
    return {l, as_contiguous(v)};
  }
  if (plan.variant == JacobiVariant::cpu) {
    const Entries entries = upper ? Entries::upper : Entries::lower;
    auto [l, v] = decompose_on_cpu<2>("aten::_linalg_eigh", input, entries, uplo, compute_v);
    return {l, v};
  }
  if (plan.variant == JacobiVariant::tridiagonal) return by_tridiagonal(input, upper, compute_v);
  const Tensor l = new_tensor(batch_sizes(input, {s.rows}), ScalarType::Float, input);
  const Tensor v = new_tensor(compute_v ? batch_sizes(input, {s.rows, s.rows}) : std::vector<int64_t>{0},
                              input.scalar_type(), input);
  if (plan.variant == JacobiVariant::empty) return {l, v};
  const Matrices a = matrices(input);
  EighParams params{a.batch_stride, a.row_stride, a.column_stride, grid_side(s.batch), grid_side(s.rows), upper};
  if (upper) std::swap(params.row_stride, params.column_stride);
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    const double size = input.element_size() / 4.0;  // a complex product has four real ones
    const gpu::Work each{size * size * jacobi_flops(s.rows, s.rows), 8.0 * size * static_cast<double>(s.rows * s.rows)};
    gpu::in_pieces(recording, s.batch, each, [&](const gpu::Piece& piece) {
      params.matrices = grid_side(piece.count);
      recording.kernel(plan.kernel).buffer(0, piece.of(a.tensor, a.batch_stride)).buffer(1, piece.of(l, s.rows));
      recording.buffer(2, compute_v ? piece.of(v, s.rows * s.rows) : gpu::view_of(l)).bytes(3, params);
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({ceil_div(params.matrices, plan.matrices_per_threadgroup)}, {plan.threads});
    });
  });
  return {l, v};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) { m.def("eigh(Tensor A, str UPLO, bool compute_v) -> (Tensor, Tensor)"); }

METALCORE_KERNELS(m) { m.impl<&metalcore::eigh>("eigh"); }

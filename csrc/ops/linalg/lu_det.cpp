// det(A) -> (value, LU, pivots) and slogdet(A) -> (sign, logabsdet, LU, pivots): the product of U's diagonal, with
// a change of sign for each exchange of rows. The determinant of a 0 x 0 matrix is 1.
#include "lu.h"

#include <tuple>

namespace metalcore {
namespace {

constexpr uint32_t kSimdgroups = 4;  // per threadgroup of lu_determinant

void determinant(const LuFactors& factors, const MatrixShape& s, const Tensor& value, const MaybeTensor& logarithm) {
  if (s.batch == 0) return;
  gpu::record(value, [&](gpu::Recording& recording) {
    recording.kernel("lu_determinant").buffer(0, factors.lu).buffer(1, factors.pivots);
    recording.buffer(2, value);
    recording.buffer(3, logarithm);
    recording.bytes(4, LuResultParams{.rows = grid_side(s.rows),
                                      .columns = grid_side(s.columns),
                                      .pivots = 0,
                                      .matrices = grid_side(s.batch),
                                      .part = 0,
                                      .logarithm = logarithm.has_value()});
    recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(s.batch, kSimdgroups))},
                                    {kSimdgroups * gpu::kSimdWidth});
  });
}

std::tuple<Tensor, Tensor, Tensor> det(const Tensor& a) {
  const MatrixShape s = check_square("det", a);
  const LuFactors factors = lu_factors(a, true, false);
  const Tensor value = new_tensor(batch_sizes(a, {}), ScalarType::Float, a);
  determinant(factors, s, value, std::nullopt);
  return {value, factors.lu, factors.pivots};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> slogdet(const Tensor& a) {
  const MatrixShape s = check_square("slogdet", a);
  const LuFactors factors = lu_factors(a, true, false);
  const Tensor sign = new_tensor(batch_sizes(a, {}), ScalarType::Float, a), logarithm = new_like(sign);
  determinant(factors, s, sign, logarithm);
  return {sign, logarithm, factors.lu, factors.pivots};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("det(Tensor A) -> (Tensor, Tensor, Tensor)");
  m.def("slogdet(Tensor A) -> (Tensor, Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::det>("det");
  m.impl<&metalcore::slogdet>("slogdet");
}

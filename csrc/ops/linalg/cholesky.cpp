// cholesky_ex(A, upper) -> (L, info): the Cholesky factorization of a batch of float32 matrices of any strides, of which
// one triangle is read; row-major results. cholesky_solve(B, L, upper): two triangular solves.
#include "matrices.h"

#include <tuple>

namespace metalcore {
namespace {

void check_square(const Tensor& a) {
  check(a.scalar_type() == ScalarType::Float, "metalcore::cholesky_ex: A must be float32, not ",
        dtype_name(a.scalar_type()));
  check(a.dim() >= 2, "linalg.cholesky: The input tensor A must have at least 2 dimensions.");
  check(a.size(-1) == a.size(-2), "linalg.cholesky: A must be batches of square matrices, but they are ", a.size(-2),
        " by ", a.size(-1), " matrices");
}

std::tuple<Tensor, Tensor> cholesky_ex(const Tensor& input, bool upper) {
  check_square(input);
  const auto [l, info] = call_torch<2>("aten::linalg_cholesky_ex", "", input, upper, false);
  return {as_contiguous(l), info};
}

Tensor cholesky_solve(const Tensor& b, const Tensor& l, bool upper) {
  return as_contiguous(call_torch<1>("aten::cholesky_solve", "", b, l, upper)[0]);
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("cholesky_ex(Tensor A, bool upper) -> (Tensor, Tensor)");
  m.def("cholesky_solve(Tensor B, Tensor L, bool upper) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl("cholesky_ex", TORCH_BOX(&metalcore::cholesky_ex));
  m.impl("cholesky_solve", TORCH_BOX(&metalcore::cholesky_solve));
}

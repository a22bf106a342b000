// solve_triangular(A, B, upper, left, unitriangular) -> X: triangular systems of batches of float32 matrices.
#include "triangular.h"

#include "matrices.h"

namespace metalcore {

Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left, bool unitriangular) {
  return as_contiguous(call_torch<1>("aten::linalg_solve_triangular", "", a, b, upper, left, unitriangular)[0]);
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("solve_triangular(Tensor A, Tensor B, bool upper, bool left, bool unitriangular) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl("solve_triangular", TORCH_BOX(&metalcore::solve_triangular));
}

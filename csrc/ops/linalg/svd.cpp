// svd(A, full_matrices, compute_uv) -> (U, S, Vh): the singular value decomposition of a batch of float32 matrices.
#include "matrices.h"

#include <optional>
#include <tuple>

namespace metalcore {

std::tuple<Tensor, Tensor, Tensor> svd(const Tensor& input, bool full_matrices, bool compute_uv) {
  const ScalarType dtype = input.scalar_type();
  check(dtype == ScalarType::Float, "metalcore::svd: A must be float32, not ", dtype_name(dtype));
  check(input.dim() >= 2, "linalg.svd: The input tensor A must have at least 2 dimensions.");
  auto [u, s, vh] = call_torch<3>("aten::_linalg_svd", "", input, full_matrices, compute_uv, std::nullopt);
  return {as_contiguous(u), s, as_contiguous(vh)};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("svd(Tensor A, bool full_matrices, bool compute_uv) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl("svd", TORCH_BOX(&metalcore::svd));
}

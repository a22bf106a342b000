// eigh(A, UPLO, compute_v) -> (L, V): eigenvalues and eigenvectors of a batch of symmetric float32 matrices.
#include "matrices.h"

#include <string>
#include <tuple>

namespace metalcore {

std::tuple<Tensor, Tensor> eigh(const Tensor& input, const std::string& uplo, bool compute_v) {
  const ScalarType dtype = input.scalar_type();
  check(dtype == ScalarType::Float, "metalcore::eigh: A must be float32, not ", dtype_name(dtype));
  check(input.dim() >= 2, "linalg.eigh: The input tensor A must have at least 2 dimensions.");
  auto [l, v] = call_torch<2>("aten::_linalg_eigh", "", input, uplo, compute_v);
  return {l, as_contiguous(v)};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("eigh(Tensor A, str UPLO, bool compute_v) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl("eigh", TORCH_BOX(&metalcore::eigh));
}

// silu and gelu.
#include "common.h"

namespace metalcore {
namespace {

Tensor silu(const Tensor& input) {
  check_float("silu", "x", input);
  Tensor x = as_contiguous(input);
  Tensor y = new_like(x);
  gpu::encode(x, [&](gpu::Encoder& encoder) {
    encoder.kernel(kernel_name("silu", x.scalar_type())).buffer(0, x).buffer(1, y);
    encoder.dispatch_threads({grid_side(x.numel())}, {256});
  });
  return y;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("silu(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(metalcore, MPS, m) {
  m.impl("silu", TORCH_BOX(&metalcore::silu));
}

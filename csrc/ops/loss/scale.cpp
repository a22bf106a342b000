// scale_(x, factor): x *= factor, where the factor is one float32 number in the device's memory.
#include "../../../kernels/loss/scale.h"
#include "../common/common.h"

#include <algorithm>

namespace metalcore {
namespace {

constexpr int64_t kMostThreads = 1 << 20;

// Returns nothing: an operator that returns its argument would be an alias of it to autograd.
Tensor scale(const Tensor& x, const Tensor& factor) {
  const char* op = "scale_";
  check_float(op, "x", x);
  check(is_dense(x), "metalcore::", op, ": x must fill its memory");
  check_float32(op, "factor", factor);
  check_same_device(op, "factor", factor, x);
  check(factor.numel() == 1, "metalcore::", op, ": factor must have one element, not ", factor.numel());
  const Tensor nothing = new_tensor({0}, x.scalar_type(), x);
  if (x.numel() == 0) return nothing;
  gpu::note_plan(op, "threads", [] { return std::string("each thread takes some elements, unless the factor is 1"); });
  gpu::record(x, [&](gpu::Recording& recording) {
    recording.kernel("scale_in_place_", suffix(x.scalar_type())).buffer(0, x).buffer(1, factor);
    recording.bytes(2, ScaleParams{.count = static_cast<uint64_t>(x.numel())});
    recording.dispatch_threads({grid_side(std::min(x.numel(), kMostThreads))}, {256});
  });
  return nothing;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) { m.def("scale_(Tensor(a!) x, Tensor factor) -> Tensor"); }

METALCORE_KERNELS(m) { m.impl<&metalcore::scale>("scale_"); }

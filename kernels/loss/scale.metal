// x *= factor, where the factor is in the GPU's memory. Where it is 1, as the gradient of a loss mostly is, nothing is
// read.
#include <metal_stdlib>

#include "loss/loss.h"

using namespace metal;

template <typename T>
kernel void scale_in_place(device T* x [[buffer(0)]], device const float* factor [[buffer(1)]],
                           constant ScaleParams& params [[buffer(2)]], uint index [[thread_position_in_grid]],
                           uint threads [[threads_per_grid]]) {
  const float by = factor[0];
  if (by == 1.0f) return;
  for (ulong i = index; i < params.count; i += threads) x[i] = static_cast<T>(by * static_cast<float>(x[i]));
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

INSTANTIATE("scale_in_place_float", scale_in_place<float>)
INSTANTIATE("scale_in_place_half", scale_in_place<half>)
INSTANTIATE("scale_in_place_bfloat", scale_in_place<bfloat>)

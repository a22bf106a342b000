// What the kernels of rms_norm and of its derivative share.
#pragma once

#include "common/rows.h"
#include "rms_norm.h"

inline float scale_of(float squares, constant RmsNormParams& params) {
  return rsqrt(squares / static_cast<float>(params.length) + params.eps);
}

// The weight of a thread's share, up to element `end`; ones where there is none.
template <bool aligned, typename Share, uint N, typename W>
inline void load_weight(Share share, thread float4 (&w)[N], device const W* weight, constant RmsNormParams& params,
                        uint end) {
  if (params.has_weight) {
    share.template load<aligned>(w, weight, end, 0.0f);
  } else {
    for (uint n = 0; n < N; ++n) w[n] = float4(1.0f);
  }
}

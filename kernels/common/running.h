// One walk along a row finds its maximum and the sum of its exponentials.
#pragma once

#include "common/rows.h"
#include "common/sums.h"

// exp of numbers that end up in a result of type R. For results of 16 bits the fast one is as good: it is off by a few
// float32 roundings times t.
template <typename R, typename V>
inline V exponential(V t) {
  if constexpr (sizeof(R) == 2)
    return fast::exp(t);
  else
    return exp(t);
}

// The running maximum of some elements and the sum of exp(x - maximum), of each component of V by itself, for results
// of type R.
template <typename R, typename V>
struct Running {
  V maximum = V(-INFINITY);
  LongSum<V> sum;

  // What to subtract from elements up to `maximum`: -inf - -inf would be NaN, where exp(-inf - 0) is the 0 we want.
  static V base(V maximum) { return select(maximum, V(0.0f), maximum == V(-INFINITY)); }

  void raise(V to) {
    sum.scale(exponential<R>(maximum - base(to)));
    maximum = to;
  }
  void add(V x) {
    raise(max(maximum, x));
    sum.add(exponential<R>(x - base(maximum)));
  }
};

// Adds N times four elements, at the cost of one exponential each.
template <typename R, uint N>
inline void add_all(thread Running<R, float>& running, thread float4 (&v)[N]) {
  float top = running.maximum;
#pragma unroll
  for (uint n = 0; n < N; ++n) top = max(top, max4(v[n]));
  running.raise(top);
  const float base = Running<R, float>::base(top);
  float4 sum = float4(0.0f);
#pragma unroll
  for (uint n = 0; n < N; ++n) sum += exponential<R>(v[n] - base);
  running.sum.add(sum4(sum));
}

// Stores a share of the body of a row, which the input's vectors are; the output's may lie elsewhere.
template <bool aligned, typename Share, uint N, typename U>
inline void store_body(Share share, thread float4 (&v)[N], device U* y, uint length, bool together) {
  if (aligned || together)
    share.template store<true>(v, y, length);
  else
    share.template store<false>(v, y, length);
}

// exp, as precise as results need it.
#pragma once

#include <metal_stdlib>

using namespace metal;

// exp of numbers that end up in a result of type R. For results of 16 bits the fast one is as good: it is off by a few
// float32 roundings times t.
template <typename R, typename V>
inline V exponential(V t) {
  if constexpr (sizeof(R) == 2)
    return fast::exp(t);
  else
    return exp(t);
}

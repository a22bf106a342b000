// Elementwise activations. Inputs and output are dense in the same order of dimensions, so that one index serves all.
#include <metal_stdlib>
using namespace metal;

struct Silu {
  static float forward(float x) { return x / (1.0f + exp(-x)); }
};

template <typename Op, typename T>
kernel void unary(device const T* x [[buffer(0)]], device T* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<T>(Op::forward(static_cast<float>(x[i])));
}

#define INSTANTIATE(name, op, suffix, T) \
  template [[host_name(name "_" suffix)]] kernel void unary<op, T>(device const T*, device T*, uint);
#define INSTANTIATE_ALL(name, op)        \
  INSTANTIATE(name, op, "float", float)  \
  INSTANTIATE(name, op, "half", half)    \
  INSTANTIATE(name, op, "bfloat", bfloat)

INSTANTIATE_ALL("silu", Silu)

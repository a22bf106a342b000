// softmax and log_softmax: what their kernels and those of their derivatives share.
#pragma once

#include "common/running.h"
#include "common/rows.h"
#include "activation/activation.h"

// With t = x - max and norm made of sum(exp(t)). `keep` is what a thread holds between its two passes over a row.
// The derivative, of type R, is gradient(g, y, total) with total = sum(term(g, y)).
// Numbers are of type V: float, or float4 for four elements (or four rows) at once.
struct Softmax {
  template <typename V>
  static V norm(V sum) {
    return 1.0f / sum;
  }
  template <typename V>
  static V keep(V t, V exp_t) {
    return exp_t;
  }
  template <typename V, typename S>
  static V finish(V kept, S norm) {
    return kept * norm;
  }
  template <typename V>
  static V term(V g, V y) {
    return g * y;
  }
  template <typename R, typename V, typename S>
  static V gradient(V g, V y, S total) {
    return y * (g - total);
  }
};

struct LogSoftmax {
  template <typename V>
  static V norm(V sum) {
    return log(sum);
  }
  template <typename V>
  static V keep(V t, V exp_t) {
    return t;
  }
  template <typename V, typename S>
  static V finish(V kept, S norm) {
    return kept - norm;
  }
  template <typename V>
  static V term(V g, V y) {
    return g;
  }
  template <typename R, typename V, typename S>
  static V gradient(V g, V y, S total) {
    return g - exponential<R>(y) * total;
  }
};

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_OP(name, Op)                             \
  INSTANTIATE_TYPES(name, Op, "_float", float, float)        \
  INSTANTIATE_TYPES(name, Op, "_half", half, half)           \
  INSTANTIATE_TYPES(name, Op, "_bfloat", bfloat, bfloat)     \
  INSTANTIATE_TYPES(name, Op, "_half_to_float", half, float) \
  INSTANTIATE_TYPES(name, Op, "_bfloat_to_float", bfloat, float)

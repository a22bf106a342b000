// What products of matrices have in common: a batch's operands, and what is made of the sums.
#pragma once

#include "activation/formulas.h"
#include "gemm/gemm.h"

// The first element of an operand for a member of the batch.
inline int64_t batch_offset(constant GemmParams& p, constant GemmOperand& operand, uint index) {
  int64_t offset = 0;
  for (uint d = 0; d < GEMM_BATCH_DIMS && index != 0; ++d) {
    offset += int64_t(index % p.batch[d]) * operand.batch[d];
    index /= p.batch[d];
  }
  return offset;
}

// The same for both operands and the result.
struct BatchOffsets {
  int64_t a, b, result;
};
inline BatchOffsets batch_offsets(constant GemmParams& p, uint index) {
  BatchOffsets offsets = {0, 0, 0};
  for (uint d = 0; d < GEMM_BATCH_DIMS && index != 0; ++d) {
    const uint next = index / p.batch[d], place = index - next * p.batch[d];
    offsets.a += int64_t(place) * p.a.batch[d];
    offsets.b += int64_t(place) * p.b.batch[d];
    offsets.result += int64_t(place) * p.result.batch[d];
    index = next;
  }
  return offsets;
}

template <typename T>
inline float activated(float x, uint activation) {
  if (activation == GEMM_RELU) return Relu<T>::forward(x);
  if (activation == GEMM_GELU) return Gelu<T>::forward(x);
  if (activation == GEMM_GELU_TANH) return GeluTanh<T>::forward(x);
  if (activation == GEMM_SILU) return Silu<T>::forward(x);
  return x;
}

// Writes `count` of 4 results, which are neighbours in memory.
template <typename T>
inline void store_neighbours(device T* results, uint count, metal::float4 values) {
  using Four = metal::vec<T, 4>;
  if (count == 4 && reinterpret_cast<uintptr_t>(results) % sizeof(Four) == 0) {
    *reinterpret_cast<device Four*>(results) = static_cast<Four>(values);
  } else {
#pragma unroll
    for (uint i = 0; i < 4; ++i)
      if (i < count) results[i] = static_cast<T>(values[i]);
  }
}

// Writes results. The pointers are those of the member of the batch.
template <typename T>
struct Epilogue {
  device const T* bias;
  device const T* residual;
  device T* result;

  void store(constant GemmParams& p, uint row, uint column, float sum) const {
    float value = p.alpha * sum;
    if (p.has_bias) value += static_cast<float>(bias[row * p.bias_row + column * p.bias_column]);
    if (p.has_residual)
      value = fma(p.beta, static_cast<float>(residual[row * p.residual.row + column * p.residual.column]), value);
    result[row * p.result.row + column * p.result.column] = static_cast<T>(activated<T>(value, p.activation));
  }
};

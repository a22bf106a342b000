// The results that are made of the factors: P, L and U, the determinant, and rows in the order of the pivots.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"

// The order of the rows after the exchanges that the pivots name: row i of P B is row permutation[i] of B. If the
// pivots name rows that do not exist, all of it is kNoRow. A threadgroup takes a matrix, and holds up to kHeld rows in
// threadgroup memory.
constant constexpr uint kHeld = 4096;
constant constexpr uint kNoRow = 0xffffffff;

[[kernel]] [[max_total_threads_per_threadgroup(32)]] void lu_permutation(device const int* pivots [[buffer(0)]],
                                                                         device uint* permutation [[buffer(1)]],
                                                                         constant LuResultParams& p [[buffer(2)]],
                                                                         uint matrix [[threadgroup_position_in_grid]],
                                                                         uint lane [[thread_index_in_threadgroup]]) {
  threadgroup uint held[kHeld];
  pivots += ulong(matrix) * p.pivots;
  permutation += ulong(matrix) * p.rows;
  const bool fits = p.rows <= kHeld;
  bool refused = false;
  for (uint k = lane; k < p.pivots; k += 32) refused = refused || uint(pivots[k]) - 1 >= p.rows;
  refused = simd_any(refused);
  for (uint i = lane; i < p.rows; i += 32) {
    if (fits)
      held[i] = refused ? kNoRow : i;
    else
      permutation[i] = refused ? kNoRow : i;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  if (lane == 0 && !refused) {
    for (uint k = 0; k < p.pivots; ++k) {
      const uint pivot = uint(pivots[k]) - 1;
      if (fits) {
        const uint row = held[pivot];
        held[pivot] = held[k];
        held[k] = row;
      } else {
        const uint row = permutation[pivot];
        permutation[pivot] = permutation[k];
        permutation[k] = row;
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  if (!fits) return;
  for (uint i = lane; i < p.rows; i += 32) permutation[i] = held[i];
}

[[kernel]] void lu_identity_permutation(device uint* permutation [[buffer(0)]],
                                        constant LuResultParams& p [[buffer(1)]], uint at [[thread_position_in_grid]]) {
  permutation[at] = at % p.rows;
}

// Makes one of P, L and U. A thread takes an element.
[[kernel]] void lu_part(device const float* lu [[buffer(0)]], device const uint* permutation [[buffer(1)]],
                        device float* part [[buffer(2)]], constant LuResultParams& p [[buffer(3)]],
                        uint at [[thread_position_in_grid]]) {
  const uint rows = p.part == LU_PART_U ? p.pivots : p.rows;
  const uint columns = p.part == LU_PART_P ? p.rows : (p.part == LU_PART_L ? p.pivots : p.columns);
  const uint column = at % columns, row = at / columns % rows, matrix = at / columns / rows;
  float value = 0.0f;
  if (p.part == LU_PART_P)
    value = permutation[ulong(matrix) * p.rows + column] == row ? 1.0f : 0.0f;
  else if (p.part == LU_PART_L ? row > column : row <= column)
    value = lu[(ulong(matrix) * p.rows + row) * p.columns + column];
  else if (p.part == LU_PART_L && row == column)
    value = 1.0f;
  part[at] = value;
}

// Row i of X is row permutation[i] of B, or with `transpose` row i of B is row permutation[i] of X. X is NaN if there
// is no order. A thread takes an element.
[[kernel]] void lu_permute(device const float* b [[buffer(0)]], device const uint* permutation [[buffer(1)]],
                           device float* x [[buffer(2)]], constant LuPermuteParams& p [[buffer(3)]],
                           uint at [[thread_position_in_grid]]) {
  const uint column = at % p.columns, row = at / p.columns % p.rows, matrix = at / p.columns / p.rows;
  const uint other = permutation[ulong(matrix) * p.rows + row];
  const bool refused = other == kNoRow;
  const uint from = p.transpose != 0 ? row : other, to = p.transpose != 0 && !refused ? other : row;
  device float& element = x[(ulong(matrix) * p.rows + to) * p.columns + column];
  if (refused)
    element = NAN;
  else if (p.identity != 0)
    element = from == column ? 1.0f : 0.0f;
  else
    element = b[matrix * p.b_batch + from * p.b_row + column * p.b_column];
}

// A product as mantissa times 2^exponent: partial products may leave float's range where the product does not.
struct Product {
  float mantissa;
  int exponent;
};

inline Product operator*(Product a, Product b) {
  int exponent;
  const float mantissa = frexp(a.mantissa * b.mantissa, exponent);
  return {mantissa, isfinite(mantissa) && mantissa != 0.0f ? a.exponent + b.exponent + exponent : 0};
}

inline Product product_of(float value) {
  int exponent;
  const float mantissa = frexp(value, exponent);
  return {mantissa, isfinite(value) ? exponent : 0};
}

// It multiplies in two steps, so that each factor is a normal number whatever the exponent is.
inline float value_of(Product a) {
  const int exponent = clamp(a.exponent, -300, 300);
  return ldexp(ldexp(a.mantissa, exponent / 2), exponent - exponent / 2);
}

// The determinant, or its sign and the logarithm of its magnitude. A simdgroup takes a matrix.
[[kernel]] [[max_total_threads_per_threadgroup(128)]] void lu_determinant(
    device const float* lu [[buffer(0)]], device const int* pivots [[buffer(1)]], device float* value [[buffer(2)]],
    device float* logarithm [[buffer(3)]], constant LuResultParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint matrix = group * 4 + simdgroup;
  const uint n = p.rows;
  const uint end = matrix < p.matrices ? n : 0;
  uint exchanges = 0;
  Product product = {1.0f, 0};
  float sum = 0.0f, sign = 1.0f;
  for (uint i = lane; i < end; i += 32) {
    const float element = lu[ulong(matrix) * n * n + ulong(i) * (n + 1)];
    exchanges += uint(pivots[ulong(matrix) * n + i]) != i + 1 ? 1 : 0;
    if (p.logarithm != 0) {
      sum += log(abs(element));
      sign *= element == 0.0f ? 0.0f : (element < 0.0f ? -1.0f : (element > 0.0f ? 1.0f : element));
    } else {
      product = product * product_of(element);
    }
  }
  const float parity = simd_sum(exchanges) % 2 == 0 ? 1.0f : -1.0f;
  sum = simd_sum(sum);
  sign = simd_product(sign);
#pragma unroll
  for (ushort distance = 16; distance > 0; distance /= 2) {
    const Product other = {simd_shuffle_xor(product.mantissa, distance), simd_shuffle_xor(product.exponent, distance)};
    product = product * other;
  }
  if (lane != 0 || matrix >= p.matrices) return;
  value[matrix] = parity * (p.logarithm != 0 ? sign : value_of(product));
  if (p.logarithm != 0) logarithm[matrix] = sum;
}

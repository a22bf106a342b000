// The results that are made of the factors: P, L and U, the determinant, and rows in the order of the pivots.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "scalars.h"

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
template <typename T>
[[kernel]] void lu_part(device const T* lu [[buffer(0)]], device const uint* permutation [[buffer(1)]],
                        device T* part [[buffer(2)]], constant LuResultParams& p [[buffer(3)]],
                        uint at [[thread_position_in_grid]]) {
  const uint rows = p.part == LU_PART_U ? p.pivots : p.rows;
  const uint columns = p.part == LU_PART_P ? p.rows : (p.part == LU_PART_L ? p.pivots : p.columns);
  const uint column = at % columns, row = at / columns % rows, matrix = at / columns / rows;
  T value = T(0.0f);
  if (p.part == LU_PART_P)
    value = permutation[ulong(matrix) * p.rows + column] == row ? number<T>(1.0f) : T(0.0f);
  else if (p.part == LU_PART_L ? row > column : row <= column)
    value = lu[(ulong(matrix) * p.rows + row) * p.columns + column];
  else if (p.part == LU_PART_L && row == column)
    value = number<T>(1.0f);
  part[at] = value;
}

// Row i of X is row permutation[i] of B, or with `transpose` row i of B is row permutation[i] of X. X is NaN if there
// is no order. A thread takes an element.
template <typename T>
[[kernel]] void lu_permute(device const T* b [[buffer(0)]], device const uint* permutation [[buffer(1)]],
                           device T* x [[buffer(2)]], constant LuPermuteParams& p [[buffer(3)]],
                           uint at [[thread_position_in_grid]]) {
  const uint column = at % p.columns, row = at / p.columns % p.rows, matrix = at / p.columns / p.rows;
  const uint other = permutation[ulong(matrix) * p.rows + row];
  const bool refused = other == kNoRow;
  const uint from = p.transpose != 0 ? row : other, to = p.transpose != 0 && !refused ? other : row;
  device T& element = x[(ulong(matrix) * p.rows + to) * p.columns + column];
  if (refused)
    element = T(NAN);
  else if (p.identity != 0)
    element = number<T>(from == column ? 1.0f : 0.0f);
  else
    element = b[matrix * p.b_batch + from * p.b_row + column * p.b_column];
}

// A product as mantissa times 2^exponent: partial products may leave float's range where the product does not.
template <typename T>
struct Product {
  T mantissa;
  int exponent;
};

// A number as mantissa and exponent. A complex number's larger part has both.
inline float split(float value, thread int& exponent) { return frexp(value, exponent); }
inline float2 split(float2 value, thread int& exponent) {
  frexp(size_of(value), exponent);
  const int half_of_it = isfinite(size_of(value)) ? -exponent / 2 : 0;
  const int rest = isfinite(size_of(value)) ? -exponent - half_of_it : 0;
  return float2(ldexp(ldexp(value.x, half_of_it), rest), ldexp(ldexp(value.y, half_of_it), rest));
}

template <typename T>
inline Product<T> product_of(T value, int factor) {
  int exponent;
  const T mantissa = split(value, exponent);
  const float size = size_of(mantissa);
  return {mantissa, isfinite(size) && size != 0.0f ? factor + exponent : 0};
}

template <typename T>
inline Product<T> operator*(Product<T> a, Product<T> b) {
  return product_of(times(a.mantissa, b.mantissa), a.exponent + b.exponent);
}

// It multiplies in two steps, so that each factor is a normal number whatever the exponent is.
inline float value_of(float mantissa, int exponent) {
  return ldexp(ldexp(mantissa, exponent / 2), exponent - exponent / 2);
}
inline float2 value_of(float2 mantissa, int exponent) {
  return float2(value_of(mantissa.x, exponent), value_of(mantissa.y, exponent));
}

// Magnitudes, and numbers of magnitude one.
inline float magnitude_of(float a) { return abs(a); }
inline float magnitude_of(float2 a) { return hypotenuse(a.x, a.y); }
inline float sign_of(float a) { return a == 0.0f ? 0.0f : (a < 0.0f ? -1.0f : (a > 0.0f ? 1.0f : a)); }
inline float2 sign_of(float2 a) {
  const float2 scaled = a * scale_to_one(size_of(a));  // a magnitude may be out of range
  const float size = hypotenuse(scaled.x, scaled.y);
  return size == 0.0f ? float2(0.0f) : scaled / size;
}

// The product of the lanes' numbers.
inline float lanes_product(float a) { return simd_product(a); }
inline float2 lanes_product(float2 a) {
#pragma unroll
  for (ushort distance = 16; distance > 0; distance /= 2) a = times(a, simd_shuffle_xor(a, distance));
  return a;
}

// The determinant, or its sign and the logarithm of its magnitude. A simdgroup takes a matrix.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(128)]] void lu_determinant(
    device const T* lu [[buffer(0)]], device const int* pivots [[buffer(1)]], device T* value [[buffer(2)]],
    device float* logarithm [[buffer(3)]], constant LuResultParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint matrix = group * 4 + simdgroup;
  const uint n = p.rows;
  const uint end = matrix < p.matrices ? n : 0;
  uint exchanges = 0;
  Product<T> product = {number<T>(1.0f), 0};
  float sum = 0.0f;
  T sign = number<T>(1.0f);
  for (uint i = lane; i < end; i += 32) {
    const T element = lu[ulong(matrix) * n * n + ulong(i) * (n + 1)];
    exchanges += uint(pivots[ulong(matrix) * n + i]) != i + 1 ? 1 : 0;
    if (p.logarithm != 0) {
      sum += log(magnitude_of(element));
      sign = times(sign, sign_of(element));
    } else {
      product = product * product_of(element, 0);
    }
  }
  const float parity = simd_sum(exchanges) % 2 == 0 ? 1.0f : -1.0f;
  sum = simd_sum(sum);
  sign = lanes_product(sign);
#pragma unroll
  for (ushort distance = 16; distance > 0; distance /= 2) {
    const Product<T> other = {simd_shuffle_xor(product.mantissa, distance),
                              simd_shuffle_xor(product.exponent, distance)};
    product = product * other;
  }
  if (lane != 0 || matrix >= p.matrices) return;
  value[matrix] = (p.logarithm != 0 ? sign : value_of(product.mantissa, clamp(product.exponent, -300, 300))) * parity;
  if (p.logarithm != 0) logarithm[matrix] = sum;
}

#define INSTANTIATE(suffix, type)                                                             \
  template [[host_name("lu_part" suffix)]] [[kernel]] void lu_part<type>(                     \
      device const type*, device const uint*, device type*, constant LuResultParams&, uint);  \
  template [[host_name("lu_permute" suffix)]] [[kernel]] void lu_permute<type>(               \
      device const type*, device const uint*, device type*, constant LuPermuteParams&, uint); \
  template [[host_name("lu_determinant" suffix)]] [[kernel]] void lu_determinant<type>(       \
      device const type*, device const int*, device type*, device float*, constant LuResultParams&, uint, uint, uint);

INSTANTIATE("", float)
INSTANTIATE("_complex", float2)

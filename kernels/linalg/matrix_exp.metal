// Exponentials of matrices of up to 32 columns, complex ones of up to 16, by scaling and squaring. A simdgroup takes
// one matrix (LANES = 32) or several, and a lane makes a column. The Taylor polynomial of degree 12 is a polynomial of
// A³ and takes five products (Paterson and Stockmeyer 1973). Column sums of at most 3/2 keep its remainder below 4e-8.
#include <metal_stdlib>
using namespace metal;

#include "lu_pivot.h"
#include "matrix_exp.h"
#include "matrix_exp_series.h"

inline float4 plus_product(float4 x, float a, float4 v) { return minus_product(x, -a, v); }
inline Complex4 plus_product(Complex4 x, float a, Complex4 v) {
  return {fma(float4(a), v.re, x.re), fma(float4(a), v.im, x.im)};
}
inline Complex4 plus_product(Complex4 x, float2 a, Complex4 v) { return minus_product(x, -a, v); }

// Four entries, from 4 q on, of the column `lane` of the identity.
template <typename T>
inline typename FourOf<T>::Type of_identity(uint q, uint lane) {
  return choose(four_of(T(0.0f)), four_of(number<T>(1.0f)), 4 * q + uint4(0, 1, 2, 3) == lane);
}

template <uint LANES, uint SIMDGROUPS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void matrix_exp_simd(
    device const T* a [[buffer(0)]], device T* result [[buffer(1)]], constant MatrixExpParams& p [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simd_lane [[thread_index_in_simdgroup]]) {
  typedef typename FourOf<T>::Type Four;
  constexpr uint Q = LANES / 4, kMatrices = 32 / LANES, kColumn = Q + 1;  // a column, and a four against bank conflicts
  threadgroup Four memory[SIMDGROUPS * kMatrices * 4 * LANES * kColumn];

  const uint place = simdgroup * kMatrices + simd_lane / LANES, lane = simd_lane % LANES;
  const uint matrix = group * SIMDGROUPS * kMatrices + place;
  const bool live = matrix < p.matrices && lane < p.size;  // the other lanes work on zeros, for the barriers
  // The columns of a product's left factor, of its right one, of A and of A². Other lanes read only the left factor's.
  threadgroup Four* const left = memory + place * 4 * LANES * kColumn;
  threadgroup Four* const own_left = left + lane * kColumn;
  threadgroup Four* const own_right = own_left + LANES * kColumn;
  threadgroup Four* const own_a = own_right + LANES * kColumn;
  threadgroup Four* const own_square = own_a + LANES * kColumn;

  float length = 0.0f;
  device const T* const from = a + matrix * p.batch_stride + lane * p.column_stride;
#pragma unroll 8
  for (uint i = 0; i < LANES; ++i) {
    const T value = live && i < p.size ? from[i * p.row_stride] : T(0.0f);
    put(own_a, i, value);
    length += length_of(value);
  }
  const uint bits = lanes_max<LANES>(as_type<uint>(length * (2.0f / 3)));
  const bool finite = bits < 0x7f800000;
  const uint squarings = squarings_of(bits);
  const float half_scale = exp2(-float(squarings / 2)), other_half = exp2(-float(squarings - squarings / 2));
#pragma unroll
  for (uint q = 0; q < Q; ++q)
    own_left[q] = own_right[q] = own_a[q] = scaled_by(scaled_by(own_a[q], half_scale), other_half);
  Four product[Q];
  const uint steps = 5 + simd_max(squarings), fours = (p.size + 3) / 4;
  for (uint step = 0; step < steps; ++step) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint q = 0; q < Q; ++q) product[q] = four_of(T(0.0f));
#pragma unroll 1
    for (uint k = 0; k < fours; ++k) {
      const Four right = own_right[k];
#pragma unroll
      for (uint e = 0; e < 4; ++e) {
        threadgroup const Four* const column = left + (4 * k + e) * kColumn;
#pragma unroll
        for (uint q = 0; q < Q; ++q) product[q] = plus_product(product[q], entry(right, e), column[q]);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint q = 0; q < Q; ++q) own_right[q] = product[q];  // registers would not hold what follows
    for (uint q = 0; q < fours; ++q) {
      const Four found = own_right[q];
      if (step == 0) {  // A²
        own_square[q] = found;
      } else if (step < 5) {  // A³, and three terms more of the polynomial in each step
        constant const float* const c = kExpCoefficients + 12 - 3 * step;
        const Four terms =
            plus_product(plus_product(scaled_by(of_identity<T>(q, lane), c[0]), c[1], own_a[q]), c[2], own_square[q]);
        if (step == 1) own_left[q] = found;
        own_right[q] = plus_product(terms, step == 1 ? c[3] : 1.0f, found);
        if (step == 4) own_left[q] = own_right[q];
      } else {
        own_left[q] = own_right[q] = step < 5 + squarings ? found : own_left[q];
      }
    }
  }
  if (!live) return;
  device T* const to = result + ulong(matrix) * p.size * p.size + lane;
  for (uint i = 0; i < p.size; ++i) to[i * p.size] = finite ? taken(own_left, i) : T(NAN);
}

#define INSTANTIATE(name, lanes, simdgroups, type)                                              \
  template [[host_name(name #lanes)]] [[kernel]] void matrix_exp_simd<lanes, simdgroups, type>( \
      device const type*, device type*, constant MatrixExpParams&, uint, uint, uint);

INSTANTIATE("matrix_exp_simd_", 8, MATRIX_EXP_SIMDGROUPS_8, float)
INSTANTIATE("matrix_exp_simd_", 16, MATRIX_EXP_SIMDGROUPS_16, float)
INSTANTIATE("matrix_exp_simd_", 32, MATRIX_EXP_SIMDGROUPS_32, float)
INSTANTIATE("matrix_exp_simd_complex_", 8, MATRIX_EXP_COMPLEX_SIMDGROUPS, float2)
INSTANTIATE("matrix_exp_simd_complex_", 16, MATRIX_EXP_COMPLEX_SIMDGROUPS, float2)

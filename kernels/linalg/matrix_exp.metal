// Exponentials of matrices by scaling and squaring. The Taylor polynomial of degree 12 is a polynomial of A³ and takes
// five products (Paterson and Stockmeyer 1973). Column sums of at most 3/2 keep its remainder below 4e-8.
#include <metal_stdlib>
using namespace metal;

#include "lu_pivot.h"
#include "matrix_exp.h"

// 1 / k!
constant constexpr float kExpCoefficients[13] = {
    1.0f,        1.0f,         1.0f / 2,      1.0f / 6,       1.0f / 24,       1.0f / 120,      1.0f / 720,
    1.0f / 5040, 1.0f / 40320, 1.0f / 362880, 1.0f / 3628800, 1.0f / 39916800, 1.0f / 479001600};

// The number of halvings that bring a norm, which has these bits, below one. NaN and infinity have none.
inline uint squarings_of(uint bits) { return bits < 0x7f800000 && bits >> 23 > 126 ? (bits >> 23) - 126 : 0; }

// Matrices of up to 32 columns, complex ones of up to 16. A simdgroup takes one matrix (LANES = 32) or several, and a
// lane makes a column.
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

// Matrices of up to 64 columns, complex ones of up to 32. A threadgroup takes a matrix, and a thread a tile of 4 x 4
// entries of it. A complex matrix is the real one (Re, -Im; Im, Re) of twice the size.
constant constexpr uint kSide = MATRIX_EXP_BLOCK_COLUMNS / 4;  // tiles in a row

inline float real_entry(device const float* a, constant MatrixExpParams& p, uint i, uint j) {
  return i < p.size && j < p.size ? a[i * p.row_stride + j * p.column_stride] : 0.0f;
}
inline float real_entry(device const float2* a, constant MatrixExpParams& p, uint i, uint j) {
  const uint n = p.size;
  if (i >= 2 * n || j >= 2 * n) return 0.0f;
  const bool below = i >= n, right = j >= n;
  const float2 value = a[(i - (below ? n : 0)) * p.row_stride + (j - (right ? n : 0)) * p.column_stride];
  return below == right ? value.x : below ? value.y : -value.y;
}
inline void store_entry(device float* to, uint n, uint i, uint j, float value) {
  if (i < n && j < n) to[i * n + j] = value;
}
inline void store_entry(device float2* to, uint n, uint i, uint j, float value) {
  if (j >= n || i >= 2 * n) return;
  device float* const at = (device float*)(to + (i < n ? i : i - n) * n + j);
  at[i < n ? 0 : 1] = value;
}

// Four rows of four entries.
struct ExpTile {
  float4 rows[4];
};

// A tile of a product's left factor, which is stored by columns.
inline void put_left(threadgroup float4* left, thread const ExpTile& tile, uint row, uint column) {
#pragma unroll
  for (uint c = 0; c < 4; ++c)
    left[(4 * column + c) * kSide + row] = float4(tile.rows[0][c], tile.rows[1][c], tile.rows[2][c], tile.rows[3][c]);
}
inline void put_right(threadgroup float4* right, thread const ExpTile& tile, uint row, uint column) {
#pragma unroll
  for (uint r = 0; r < 4; ++r) right[(4 * row + r) * kSide + column] = tile.rows[r];
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(kSide * kSide)]] void matrix_exp_block(
    device const T* a [[buffer(0)]], device T* result [[buffer(1)]], constant MatrixExpParams& p [[buffer(2)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 left[MATRIX_EXP_BLOCK_COLUMNS * kSide], right[MATRIX_EXP_BLOCK_COLUMNS * kSide];
  const uint row = thread_index / kSide, column = thread_index % kSide;
  const uint size = p.size * (sizeof(T) / sizeof(float));
  ExpTile power, square, found;
  float4 lengths = float4(0.0f);
  a += matrix * p.batch_stride;
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
#pragma unroll
    for (uint c = 0; c < 4; ++c) power.rows[r][c] = real_entry(a, p, 4 * row + r, 4 * column + c);
    lengths += abs(power.rows[r]);
  }
  // Column sums, and the bits of the largest, with NaN above infinity.
  right[thread_index] = lengths;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  lengths = float4(0.0f);
  for (uint r = 0; r < kSide; ++r) lengths += right[r * kSide + column];
  const uint4 column_bits = as_type<uint4>(abs(lengths * (2.0f / 3)));
  const uint bits = simd_max(max(max(column_bits.x, column_bits.y), max(column_bits.z, column_bits.w)));
  const bool finite = bits < 0x7f800000;
  const uint squarings = squarings_of(bits);
  const float half_scale = exp2(-float(squarings / 2)), other_half = exp2(-float(squarings - squarings / 2));
#pragma unroll
  for (uint r = 0; r < 4; ++r) power.rows[r] = (power.rows[r] * half_scale) * other_half;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  put_left(left, power, row, column);
  put_right(right, power, row, column);
  for (uint step = 0; step < 5 + squarings; ++step) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint r = 0; r < 4; ++r) found.rows[r] = float4(0.0f);
#pragma unroll 4
    for (uint k = 0; k < size; ++k) {
      const float4 down = left[k * kSide + row], along = right[k * kSide + column];
#pragma unroll
      for (uint r = 0; r < 4; ++r) found.rows[r] = fma(float4(down[r]), along, found.rows[r]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (step == 0) {  // A²
      square = found;
      put_right(right, found, row, column);
      continue;
    }
    if (step == 1) put_left(left, found, row, column);  // A³
    if (step < 5) {                                     // three terms more of the polynomial
      constant const float* const c = kExpCoefficients + 12 - 3 * step;
#pragma unroll
      for (uint r = 0; r < 4; ++r) {
        const float4 identity = select(float4(0.0f), float4(c[0]), 4 * column + uint4(0, 1, 2, 3) == 4 * row + r);
        const float4 terms = fma(float4(c[1]), power.rows[r], fma(float4(c[2]), square.rows[r], identity));
        found.rows[r] = fma(float4(step == 1 ? c[3] : 1.0f), found.rows[r], terms);
      }
    }
    if (step >= 4) put_left(left, found, row, column);
    put_right(right, found, row, column);
  }
#pragma unroll
  for (uint r = 0; r < 4; ++r)
#pragma unroll
    for (uint c = 0; c < 4; ++c)
      store_entry(result + ulong(matrix) * p.size * p.size, p.size, 4 * row + r, 4 * column + c,
                  finite ? found.rows[r][c] : NAN);
}

#define INSTANTIATE_BLOCK(name, type)                                                                   \
  template [[host_name(name)]] [[kernel]] void matrix_exp_block<type>(device const type*, device type*, \
                                                                      constant MatrixExpParams&, uint, uint);

INSTANTIATE_BLOCK("matrix_exp_block", float)
INSTANTIATE_BLOCK("matrix_exp_block_complex", float2)

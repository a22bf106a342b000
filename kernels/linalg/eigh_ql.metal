// Eigenvalues and eigenvectors of Hermitian matrices of up to 32 rows, by a simdgroup each: Householder's reflectors
// make the matrix tridiagonal (LAPACK's hetd2), implicit QL (tridiagonal_ql.h) makes that diagonal, and the reflectors
// turn its eigenvectors into the matrix's. A lane has a column of the matrix, and later one of the eigenvectors.
//
// A is divided by a power of two that makes its largest entry about one. If a matrix has NaN or infinities, all its
// results are NaN.
#include <metal_stdlib>
using namespace metal;

#include "column_tile.h"
#include "hermitian.h"
#include "spectral.h"
#include "tridiagonal_ql.h"

constant constexpr uint kSize = 32;
constant constexpr uint kFours = kSize / 4;
constant constexpr uint kStride = kSize + 1;    // of the tridiagonal matrix's eigenvectors
constant constexpr float kNoColumn = 0x1p-80f;  // the square of a column that counts as zeros

// The memory of a simdgroup.
struct QlMemory {
  Complex4 reflectors[kSize * kFours];  // row k has the one of column k, with zeros up to its leading 1
  Complex4 w[kFours];
  float eigenvectors[kSize * kStride];  // of the tridiagonal matrix
};

// I - tau v vᴴ, whose conjugate transpose makes a column (alpha, rest) the multiple beta, a real number, of e₁. v is 1
// and the rest times `inverse`.
struct QlReflector {
  float beta;
  float2 tau, inverse;
};

// The entries are at most about one, so that only small squares leave the range.
inline QlReflector ql_reflector(float2 alpha, float squares_of_rest) {
  const float total = add_square(squares_of_rest, alpha);
  if (!(total > kNoColumn)) return {0.0f, float2(0.0f), float2(0.0f)};
  const float reciprocal = rsqrt(total);
  const float inverse_norm = -copysign(reciprocal * newton_factor(0.5f * total * reciprocal, reciprocal), alpha.x);
  const float beta = total * inverse_norm;
  const float2 difference = float2(alpha.x - beta, alpha.y);
  const float square = add_square(0.0f, difference), quotient = fast::divide(1.0f, square);
  const float inverse = fma(quotient, fma(-square, quotient, 1.0f), quotient);  // with a Newton step
  return {beta, float2(fma(-alpha.x, inverse_norm, 1.0f), -alpha.y * inverse_norm), conjugate(difference) * inverse};
}

// The loads of half of the rows are under way at once. Most rows are zeros of the reflector in half of the steps.
template <uint FIRST>
inline void add_half(thread Complex4& sum, thread const Complex4* x, threadgroup const Complex4* v) {
#pragma unroll
  for (uint q = FIRST; q < FIRST + kFours / 2; ++q) add_products(sum, x[q], v[q]);
}
// The other way around: the products with the conjugates of v.
template <uint FIRST>
inline void add_half(thread Complex4& sum, threadgroup const Complex4* v, thread const Complex4* x) {
#pragma unroll
  for (uint q = FIRST; q < FIRST + kFours / 2; ++q) add_products(sum, v[q], x[q]);
}
template <uint FIRST>
inline void subtract_half(thread Complex4* x, float2 factor, threadgroup const Complex4* v) {
#pragma unroll
  for (uint q = FIRST; q < FIRST + kFours / 2; ++q) x[q] = minus_product(x[q], factor, v[q]);
}

// Lane k gets diagonal entry k, the entry below it, and tau of reflector k.
inline void reduce_to_tridiagonal(thread Complex4* x, uint n, uint lane, threadgroup QlMemory& memory, thread float& d,
                                  thread float& e, thread float2& tau) {
  for (uint k = 0; k < n; ++k) {
    threadgroup Complex4* const reflector = memory.reflectors + k * kFours;
    if (lane == k)
#pragma unroll
      for (uint q = 0; q < kFours; ++q) reflector[q] = x[q];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float2 own_entry = taken(reflector, lane), alpha = simd_shuffle(own_entry, ushort((k + 1) % kSize));
    if (lane == k) d = own_entry.x;
    if (k + 1 == n) break;
    const QlReflector h = ql_reflector(alpha, simd_sum(lane > k + 1 ? add_square(0.0f, own_entry) : 0.0f));
    if (lane == k) e = h.beta, tau = h.tau;
    const float2 one = number<float2>(lane == k + 1 ? 1.0f : 0.0f);
    const float2 own = lane > k + 1 ? times(own_entry, h.inverse) : one;
    put(reflector, lane, own);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // A - v wᴴ - w vᴴ with w = tau A v - (tau / 2) ((tau A v)ᴴ v) v
    const bool is_upper = k + 1 < kSize / 2;
    Complex4 sums = four_of(float2(0.0f));
    if (is_upper) add_half<0>(sums, x, reflector);
    add_half<kFours / 2>(sums, x, reflector);
    const float2 product = lane > k ? times(h.tau, sum_of(sums)) : float2(0.0f);
    const float2 own_share = times(conjugate(product), own);
    const float2 share = times(h.tau, float2(simd_sum(own_share.x), simd_sum(own_share.y)));
    const float2 w = add_product(product, -0.5f * share, own);
    put(memory.w, lane, w);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (is_upper) {
      subtract_half<0>(x, conjugate(w), reflector);
      subtract_half<0>(x, conjugate(own), memory.w);
    }
    subtract_half<kFours / 2>(x, conjugate(w), reflector);
    subtract_half<kFours / 2>(x, conjugate(own), memory.w);
  }
}

inline void apply_reflectors(thread Complex4* x, uint n, threadgroup const QlMemory& memory, float2 tau) {
  for (uint k = n - 1; k-- > 0;) {
    threadgroup const Complex4* const reflector = memory.reflectors + k * kFours;
    const bool is_upper = k + 1 < kSize / 2;
    Complex4 sums = four_of(float2(0.0f));
    if (is_upper) add_half<0>(sums, reflector, x);
    add_half<kFours / 2>(sums, reflector, x);
    const float2 product = times(simd_shuffle(tau, ushort(k)), sum_of(sums));
    if (is_upper) subtract_half<0>(x, product, reflector);
    subtract_half<kFours / 2>(x, product, reflector);
  }
}

template <bool VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * EIGH_QL_SIMDGROUPS)]] void eigh_ql(
    device const float2* a [[buffer(0)]], device float* values [[buffer(1)]], device float2* vectors [[buffer(2)]],
    constant EighParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup QlMemory memories[EIGH_QL_SIMDGROUPS];
  threadgroup QlMemory& memory = memories[simdgroup];
  const uint matrix = group * EIGH_QL_SIMDGROUPS + simdgroup, n = p.size;
  if (matrix >= p.matrices) return;
  device const float2* const from = a + matrix * p.batch_stride;
  Complex4 x[kFours];
  uint4 magnitude = uint4(0);  // as bits, which compare as the numbers do, with NaN above infinity
#pragma unroll
  for (uint q = 0; q < kFours; ++q) {
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
      const uint row = 4 * q + i, first = max(row, lane), second = min(row, lane);
      set_entry(x[q], i,
                first < n ? of_triangle(from[first * p.row_stride + second * p.column_stride], row, lane, p.conjugate)
                          : float2(0.0f));
    }
    magnitude = max(magnitude, bits_of(x[q]));
  }
  const uint bits = simd_max(max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
  const bool finite = bits < 0x7f800000;
  const float scale = finite ? scale_to_one(as_type<float>(bits)) : 1.0f;
#pragma unroll
  for (uint q = 0; q < kFours; ++q) x[q] = finite ? scaled_by(x[q], scale) : four_of(float2(0.0f));

  float d = 0.0f, e = 0.0f;
  float2 tau = float2(0.0f);
  reduce_to_tridiagonal(x, n, lane, memory, d, e, tau);
  threadgroup float* const own_row = memory.eigenvectors + lane * kStride;
  if (VECTORS)
    for (uint i = 0; i < kSize; ++i) own_row[i] = i == lane ? 1.0f : 0.0f;
  tridiagonal_ql<VECTORS>(d, e, n, lane, own_row);
  const uint rank = rank_among(d, n, lane);
  if (lane < n) values[ulong(matrix) * n + rank] = finite ? d * inverse_of_scale(scale) : NAN;
  if (!VECTORS) return;
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint q = 0; q < kFours; ++q)
#pragma unroll
    for (uint i = 0; i < 4; ++i)
      set_entry(x[q], i, number<float2>(finite ? memory.eigenvectors[(4 * q + i) * kStride + lane] : NAN));
  apply_reflectors(x, n, memory, tau);
  if (lane >= n) return;
  device float2* const to = vectors + ulong(matrix) * n * n + rank;
#pragma unroll
  for (uint q = 0; q < kFours; ++q)
#pragma unroll
    for (uint i = 0; i < 4; ++i)
      if (4 * q + i < n) to[(4 * q + i) * n] = entry(x[q], i);
}

#define INSTANTIATE(name, with_vectors)                               \
  template [[host_name(name)]] [[kernel]] void eigh_ql<with_vectors>( \
      device const float2*, device float*, device float2*, constant EighParams&, uint, uint, uint);

INSTANTIATE("eigh_ql_complex_32", true)
INSTANTIATE("eigh_ql_complex_values_32", false)

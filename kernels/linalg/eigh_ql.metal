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

constant constexpr float kNoColumn = 0x1p-80f;  // the square of a column that counts as zeros

// The memory of a simdgroup, for matrices of up to SIZE rows.
template <uint SIZE_, typename T>
struct QlMemory {
  typedef T Number;
  typedef typename FourOf<T>::Type Four;
  static constexpr constant uint SIZE = SIZE_, FOURS = SIZE_ / 4;
  static constexpr constant uint STRIDE = SIZE_ + 1;  // of the tridiagonal matrix's eigenvectors

  Four reflectors[SIZE * FOURS];  // row k has the one of column k, with zeros up to its leading 1
  Four w[FOURS];
  float eigenvectors[32 * STRIDE];  // of the tridiagonal matrix
};

inline float full_sum(float value) { return simd_sum(value); }
inline float2 full_sum(float2 value) { return float2(simd_sum(value.x), simd_sum(value.y)); }

// I - tau v vᴴ, whose conjugate transpose makes a column (alpha, rest) the multiple beta, a real number, of e₁. v is 1
// and the rest times `inverse`.
template <typename T>
struct QlReflector {
  float beta;
  T tau, inverse;
};
inline float ql_tau(float alpha, float inverse) { return fma(-alpha, inverse, 1.0f); }
inline float2 ql_tau(float2 alpha, float inverse) { return float2(fma(-alpha.x, inverse, 1.0f), -alpha.y * inverse); }
inline float ql_inverse(float a) { return 1.0f / a; }
inline float2 ql_inverse(float2 a) { return conjugate(a) * (1.0f / fma(a.x, a.x, a.y * a.y)); }

// The entries are at most about one, so that only small squares leave the range.
template <typename T>
inline QlReflector<T> ql_reflector(T alpha, float squares_of_rest) {
  const float total = add_square(squares_of_rest, alpha);
  if (!(total > kNoColumn)) return {0.0f, T(0.0f), T(0.0f)};
  const float inverse_norm = -copysign(exact_rsqrt(total), real_part(alpha));
  const float beta = total * inverse_norm;
  return {beta, ql_tau(alpha, inverse_norm), ql_inverse(alpha - number<T>(beta))};
}

// Lane k gets diagonal entry k, the entry below it, and tau of reflector k.
template <typename Memory>
inline void reduce_to_tridiagonal(thread typename Memory::Four* x, uint n, uint lane, threadgroup Memory& memory,
                                  thread float& d, thread float& e, thread typename Memory::Number& tau) {
  typedef typename Memory::Four Four;
  typedef typename Memory::Number T;
  const uint last = Memory::SIZE - 1;
  for (uint k = 0; k < n; ++k) {
    threadgroup Four* const reflector = memory.reflectors + k * Memory::FOURS;
    if (lane == k)
#pragma unroll
      for (uint q = 0; q < Memory::FOURS; ++q) reflector[q] = x[q];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const T entry_of_column = taken(reflector, min(lane, last)), alpha = taken(reflector, min(k + 1, last));
    if (lane == k) d = real_part(entry_of_column);
    if (k + 1 == n) break;
    const bool below = lane > k + 1 && lane <= last;
    const float squares = simd_sum(below ? add_square(0.0f, entry_of_column) : 0.0f);
    const QlReflector<T> h = ql_reflector(alpha, squares);
    const T own = below ? times(entry_of_column, h.inverse) : lane == k + 1 ? number<T>(1.0f) : T(0.0f);
    if (lane == k) e = h.beta, tau = h.tau;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (lane <= last) put(reflector, lane, own);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // A - v wᴴ - w vᴴ with w = tau A v - (tau / 2) ((tau A v)ᴴ v) v
    const uint first = (k + 1) / 4;
    Four sums = four_of(T(0.0f));
#pragma unroll
    for (uint q = 0; q < Memory::FOURS; ++q)
      if (q >= first) add_products(sums, x[q], reflector[q]);
    const T product = lane > k ? times(h.tau, sum_of(sums)) : T(0.0f);
    const T share = times(h.tau, full_sum(times(conjugate(product), own)));
    const T w = add_product(product, times(-0.5f, share), own);
    if (lane <= last) put(memory.w, lane, w);
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint q = 0; q < Memory::FOURS; ++q)
      if (q >= first)
        x[q] = minus_product(minus_product(x[q], conjugate(w), reflector[q]), conjugate(own), memory.w[q]);
  }
}

template <typename Memory>
inline void apply_reflectors(thread typename Memory::Four* x, uint n, threadgroup const Memory& memory,
                             typename Memory::Number tau) {
  typedef typename Memory::Four Four;
  typedef typename Memory::Number T;
  for (uint k = n - 1; k-- > 0;) {
    threadgroup const Four* const reflector = memory.reflectors + k * Memory::FOURS;
    const uint first = (k + 1) / 4;
    Four sums = four_of(T(0.0f));
#pragma unroll
    for (uint q = 0; q < Memory::FOURS; ++q)
      if (q >= first) add_products(sums, reflector[q], x[q]);
    const T product = times(simd_shuffle(tau, ushort(k)), sum_of(sums));
#pragma unroll
    for (uint q = 0; q < Memory::FOURS; ++q)
      if (q >= first) x[q] = minus_product(x[q], product, reflector[q]);
  }
}

template <uint SIZE, typename T, bool VECTORS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * EIGH_QL_SIMDGROUPS)]] void eigh_ql(
    device const T* a [[buffer(0)]], device float* values [[buffer(1)]], device T* vectors [[buffer(2)]],
    constant EighParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef QlMemory<SIZE, T> Memory;
  threadgroup Memory memories[EIGH_QL_SIMDGROUPS];
  threadgroup Memory& memory = memories[simdgroup];
  const uint matrix = group * EIGH_QL_SIMDGROUPS + simdgroup, n = p.size;
  if (matrix >= p.matrices) return;
  device const T* const from = a + matrix * p.batch_stride;
  typename Memory::Four x[Memory::FOURS];
  uint4 magnitude = uint4(0);  // as bits, which compare as the numbers do, with NaN above infinity
#pragma unroll
  for (uint q = 0; q < Memory::FOURS; ++q) {
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
      const uint row = 4 * q + i, first = max(row, lane), second = min(row, lane);
      set_entry(x[q], i,
                first < n ? of_triangle(from[first * p.row_stride + second * p.column_stride], row, lane, p.conjugate)
                          : T(0.0f));
    }
    magnitude = max(magnitude, bits_of(x[q]));
  }
  const uint bits = simd_max(max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
  const bool finite = bits < 0x7f800000;
  const float scale = finite ? scale_to_one(as_type<float>(bits)) : 1.0f;
#pragma unroll
  for (uint q = 0; q < Memory::FOURS; ++q) x[q] = finite ? scaled_by(x[q], scale) : four_of(T(0.0f));

  float d = 0.0f, e = 0.0f;
  T tau = T(0.0f);
  reduce_to_tridiagonal(x, n, lane, memory, d, e, tau);
  threadgroup float* const own_row = memory.eigenvectors + lane * Memory::STRIDE;
  for (uint i = 0; i < SIZE; ++i) own_row[i] = i == lane ? 1.0f : 0.0f;
  tridiagonal_ql(d, e, n, lane, own_row);
  const uint rank = rank_among(d, n, lane);
  if (lane < n) values[ulong(matrix) * n + rank] = finite ? d * inverse_of_scale(scale) : NAN;
  if (!VECTORS) return;
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint q = 0; q < Memory::FOURS; ++q)
#pragma unroll
    for (uint i = 0; i < 4; ++i)
      set_entry(x[q], i, number<T>(finite ? memory.eigenvectors[(4 * q + i) * Memory::STRIDE + lane] : NAN));
  apply_reflectors(x, n, memory, tau);
  if (lane >= n) return;
  device T* const to = vectors + ulong(matrix) * n * n + rank;
#pragma unroll
  for (uint q = 0; q < Memory::FOURS; ++q)
#pragma unroll
    for (uint i = 0; i < 4; ++i)
      if (4 * q + i < n) to[(4 * q + i) * n] = entry(x[q], i);
}

#define INSTANTIATE_OF(name, size, type, with_vectors)                            \
  template [[host_name(name)]] [[kernel]] void eigh_ql<size, type, with_vectors>( \
      device const type*, device float*, device type*, constant EighParams&, uint, uint, uint);
#define INSTANTIATE(name, size, type)          \
  INSTANTIATE_OF(name #size, size, type, true) \
  INSTANTIATE_OF(name "values_" #size, size, type, false)

INSTANTIATE("eigh_ql_", 8, float)
INSTANTIATE("eigh_ql_", 16, float)
INSTANTIATE("eigh_ql_", 32, float)
INSTANTIATE("eigh_ql_complex_", 8, float2)
INSTANTIATE("eigh_ql_complex_", 16, float2)
INSTANTIATE("eigh_ql_complex_", 32, float2)

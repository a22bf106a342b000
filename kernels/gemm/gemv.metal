// Products of few rows and a matrix b, which is read once for GEMV_ROWS rows. The simdgroups of a threadgroup share the
// terms, and leave their sums in threadgroup memory.
//
//   terms    terms lie next to each other in b: lanes take packs of them, of GEMV_LINES columns at once
//   columns  columns do, or nothing does: 8 lanes take 4 columns each, and the others other terms
#include "common/rows.h"
#include "gemm/epilogue.h"

// The rows and the member of the batch that a threadgroup works with.
struct Rows {
  uint first, member;
};
template <uint kRows>
inline Rows rows_of(constant GemmParams& p, uint index) {
  index += p.first;
  return {index % p.row_tiles * kRows, index / p.row_tiles};
}

// The threads store the sums, of which each simdgroup has left one for each row and column.
template <uint kRows, uint kColumns, typename T>
inline void store_sums(constant GemmParams& p, threadgroup const float* sums, Epilogue<T> epilogue, uint row,
                       uint column, uint thread_index, uint simdgroups) {
  for (uint i = thread_index; i < kRows * kColumns; i += 32 * simdgroups) {
    float sum = 0.0f;
    for (uint s = 0; s < simdgroups; ++s) sum += sums[s * kRows * kColumns + i];
    if (row + i / kColumns < p.rows && column + i % kColumns < p.columns)
      epilogue.store(p, row + i / kColumns, column + i % kColumns, sum);
  }
}

template <typename T, uint kRows>
[[kernel]] [[max_total_threads_per_threadgroup(32 * GEMV_SIMDGROUPS)]] void gemv_terms(
    device const T* a_ [[buffer(0)]], device const T* b_ [[buffer(1)]], device const T* bias [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* result [[buffer(4)]], constant GemmParams& p [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr uint kPack = kPackElements<T>, kVectors = kPackVectors<T>;
  threadgroup float sums[GEMV_SIMDGROUPS * kRows * GEMV_LINES];
  const Rows rows = rows_of<kRows>(p, group.y);
  const uint column = group.x * GEMV_LINES;
  device const T* const a = a_ + batch_offset(p, p.a, rows.member);
  device const T* const b = b_ + batch_offset(p, p.b, rows.member);
  float own[kRows * GEMV_LINES];
#pragma unroll
  for (uint i = 0; i < kRows * GEMV_LINES; ++i) own[i] = 0.0f;

  if (p.a_packs && p.b_packs) {
    for (uint term = (simdgroup * 32 + lane) * kPack; term < p.terms; term += 32 * kPack * simdgroups) {
      Pack<T> loaded[GEMV_LINES];
#pragma unroll
      for (uint n = 0; n < GEMV_LINES; ++n)
        loaded[n] =
            *reinterpret_cast<device const Pack<T>*>(b + min(column + n, p.columns - 1) * p.b.column + int64_t(term));
      float4 x[kRows][kVectors];
#pragma unroll
      for (uint m = 0; m < kRows; ++m)
        unpack(*reinterpret_cast<device const Pack<T>*>(a + min(rows.first + m, p.rows - 1) * p.a.row + int64_t(term)),
               x[m]);
#pragma unroll
      for (uint n = 0; n < GEMV_LINES; ++n) {
        float4 w[kVectors];
        unpack(loaded[n], w);
#pragma unroll
        for (uint m = 0; m < kRows; ++m) {
          float4 products = x[m][0] * w[0];
#pragma unroll
          for (uint v = 1; v < kVectors; ++v) products = fma(x[m][v], w[v], products);
          own[m * GEMV_LINES + n] += sum4(products);
        }
      }
    }
  } else {
    for (uint term = simdgroup * 32 + lane; term < p.terms; term += 32 * simdgroups) {
#pragma unroll
      for (uint n = 0; n < GEMV_LINES; ++n) {
        const float w = static_cast<float>(b[min(column + n, p.columns - 1) * p.b.column + term * p.b.row]);
#pragma unroll
        for (uint m = 0; m < kRows; ++m) {
          const float x = static_cast<float>(a[min(rows.first + m, p.rows - 1) * p.a.row + term * p.a.column]);
          own[m * GEMV_LINES + n] = fma(x, w, own[m * GEMV_LINES + n]);
        }
      }
    }
  }
  const float sum = simd_sums(own, lane);
  constexpr uint kShare = 32 / (kRows * GEMV_LINES);
  if (lane % kShare == 0) sums[simdgroup * kRows * GEMV_LINES + lane / kShare] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Epilogue<T> epilogue = {bias, residual + batch_offset(p, p.residual, rows.member),
                                result + batch_offset(p, p.result, rows.member)};
  store_sums<kRows, GEMV_LINES>(p, sums, epilogue, rows.first, column, thread_index, simdgroups);
}

template <typename T, uint kRows>
[[kernel]] [[max_total_threads_per_threadgroup(32 * GEMV_SIMDGROUPS)]] void gemv_columns(
    device const T* a_ [[buffer(0)]], device const T* b_ [[buffer(1)]], device const T* bias [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* result [[buffer(4)]], constant GemmParams& p [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[GEMV_SIMDGROUPS * kRows * GEMV_COLUMNS];
  const Rows rows = rows_of<kRows>(p, group.y);
  const uint first_column = group.x * GEMV_COLUMNS, column = first_column + lane % 8 * 4;
  device const T* const a = a_ + batch_offset(p, p.a, rows.member);
  device const T* const b = b_ + batch_offset(p, p.b, rows.member);
  float4 own[kRows];
#pragma unroll
  for (uint m = 0; m < kRows; ++m) own[m] = 0.0f;

  for (uint term = simdgroup * 4 + lane / 8; term < p.terms; term += 4 * simdgroups) {
    float4 w;
    if (p.b_packs) {
      w = static_cast<float4>(
          *reinterpret_cast<device const vec<T, 4>*>(b + term * p.b.row + min(column, p.columns - 4)));
    } else {
#pragma unroll
      for (uint n = 0; n < 4; ++n)
        w[n] = static_cast<float>(b[term * p.b.row + min(column + n, p.columns - 1) * p.b.column]);
    }
#pragma unroll
    for (uint m = 0; m < kRows; ++m) {
      const float x = static_cast<float>(a[min(rows.first + m, p.rows - 1) * p.a.row + term * p.a.column]);
      own[m] = fma(float4(x), w, own[m]);
    }
  }
#pragma unroll
  for (uint m = 0; m < kRows; ++m) {
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
      own[m][n] += simd_shuffle_xor(own[m][n], 8);
      own[m][n] += simd_shuffle_xor(own[m][n], 16);
      if (lane < 8) sums[(simdgroup * kRows + m) * GEMV_COLUMNS + lane * 4 + n] = own[m][n];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Epilogue<T> epilogue = {bias, residual + batch_offset(p, p.residual, rows.member),
                                result + batch_offset(p, p.result, rows.member)};
  store_sums<kRows, GEMV_COLUMNS>(p, sums, epilogue, rows.first, first_column, thread_index, simdgroups);
}

#define INSTANTIATE_AS(T, kernel_name, rows) \
  template [[host_name(#kernel_name #rows "_" #T)]] [[kernel]] decltype(kernel_name<T, rows>) kernel_name<T, rows>;
#define INSTANTIATE(T)             \
  INSTANTIATE_AS(T, gemv_terms, 1) \
  INSTANTIATE_AS(T, gemv_terms, 4) INSTANTIATE_AS(T, gemv_columns, 1) INSTANTIATE_AS(T, gemv_columns, 4)
INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)

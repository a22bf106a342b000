// Products of matrices of 16-bit elements on GPUs whose units multiply tensors: a threadgroup's tile is one matmul2d,
// which reads its operands from device memory. In each matrix the elements of a row or else of a column are neighbours.
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "common/earlier.h"
#include "common/joined_tile.h"
#include "gemm/epilogue.h"
#include "gemm/job.h"
#include "gemm/unit_results.h"

using namespace metal;
using namespace mpp::tensor_ops;

// The tile of a threadgroup. Bands of tiles below each other are made at about the same time, so that caches keep what
// they read.
inline uint2 tile_of(uint2 group, uint2 groups) {
  const uint linear = group.y * groups.x + group.x, band = linear / (GEMM_UNIT_BAND * groups.x);
  const uint rows = min(uint(GEMM_UNIT_BAND), groups.y - band * GEMM_UNIT_BAND);
  const uint within = linear - band * GEMM_UNIT_BAND * groups.x;
  return uint2(within / rows, band * GEMM_UNIT_BAND + within % rows);
}

// kTerms: how many terms there are at most, or dynamic_length_v. kAcross: whether the elements of columns are
// neighbours in a, and in b. Threadgroups that share a tile run together, or leave their sums in `result`, each
// behind those of the one before and in the order of results, and gemm_unit_sum adds them.
template <typename T, uint kRows, uint kColumns, uint kThreads, int kTerms, bool kAcrossA, bool kAcrossB>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void gemm_unit(
    device T* a [[buffer(0)]], device T* b [[buffer(1)]], device const T* bias [[buffer(2)]],
    device const T* residual [[buffer(3)]], device const int* ends [[buffer(4)]], device T* result [[buffer(5)]],
    constant GemmParams& p [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr auto descriptor = matmul2d_descriptor(kRows, kColumns, kTerms, kAcrossA, kAcrossB);
  constexpr matmul2d<descriptor, execution_simdgroups<kThreads / 32>> multiply;
  // All before the second call costs no time where this kernel begins early.
  metalcore_begin_later_kernels(0);
  if (p.grouped != 0) metalcore_await_earlier_kernels(0);
  uint split = group.z;
  if (p.together > 1) {
    groups.y /= p.together;
    split = group.y % p.together;
    group.y /= p.together;
  }
  const uint2 tile = tile_of(group.xy, groups.xy);
  const Job job = job_of<kRows>(p, ends, p.first + tile.y);
  if (job.begin_row >= job.end_row) return;
  const uint column = tile.x * kColumns, rows = job.end_row - job.begin_row, columns = p.columns - column;
  const uint begin_term = min(job.begin_term + split * p.split_terms, job.end_term);
  const uint terms = job.exists ? min(job.end_term - begin_term, p.split_terms) : 0;
  const BatchOffsets offsets = batch_offsets(p, job.member);
  device T* const from_a = a + offsets.a + job.begin_row * p.a.row + begin_term * p.a.column;
  device T* const from_b = b + (job.exists ? offsets.b : 0) + begin_term * p.b.row + column * p.b.column;
  device T* const operands[] = {from_a, from_b};
  metalcore_await_earlier_kernels(operands, 0);
  auto left = kAcrossA ? unit_part(from_a, rows, terms, p.a.column) : unit_part(from_a, terms, rows, p.a.row);
  auto right = kAcrossB ? unit_part(from_b, terms, columns, p.b.column) : unit_part(from_b, columns, terms, p.b.row);
  auto sums = multiply.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  multiply.run(left, right, sums);

  if (groups.z > 1) {
    device float* const parts = reinterpret_cast<device float*>(result) + int64_t(group.z) * p.rows * p.columns;
    device float* const to = parts + job.begin_row * p.result.row + column * p.result.column;
    sums.store(unit_part(to, columns, rows, p.result.row, p.result.column));
    return;
  }
  device T* const results = result + offsets.result;
  if (p.together > 1) {
    const JoinedTile<kRows, kColumns, kThreads> joined = {rows, columns};
    const Epilogue<T> epilogue = {bias, residual, results};
    if (p.result.column == 1)
      joined.template store<true>(sums, p.together, split, thread_index,
                                  TileResults<true, T>{epilogue, p, job.begin_row, column});
    else
      joined.template store<false>(sums, p.together, split, thread_index,
                                   TileResults<false, T>{epilogue, p, job.begin_row, column});
    return;
  }
  const UnitResults<T> made = {bias, residual, results, job.begin_row, column, job.end_row, job.member};
  auto values = multiply.template get_destination_cooperative_tensor<decltype(left), decltype(right), T>();
  made.store(p, sums, values);
}

template <typename T>
[[kernel]] void gemm_unit_sum(device const float* parts [[buffer(0)]], device const T* bias [[buffer(2)]],
                              device const T* residual [[buffer(3)]], device T* result [[buffer(5)]],
                              constant GemmParams& p [[buffer(6)]], uint thread_index [[thread_position_in_grid]]) {
  metalcore_begin_later_kernels(0);
  metalcore_await_earlier_kernels(0);
  const uint index = thread_index * GEMM_UNIT_SUMS, count = p.rows * p.columns;
  if (index >= count) return;
  const float4 sum = sum_parts(parts, index, count, (p.terms + p.split_terms - 1) / p.split_terms);
  const bool in_rows = p.result.column == 1;
  const uint length = in_rows ? p.columns : p.rows;
  const Epilogue<T> epilogue = {bias, residual, result};
  const uint outer = index / length, inner = index - outer * length;
  if (length % GEMM_UNIT_SUMS != 0) {
#pragma unroll
    for (uint j = 0; j < GEMM_UNIT_SUMS; ++j) {
      const bool wraps = inner + j >= length;  // lengths are above GEMM_UNIT_SUMS
      const uint line = outer + wraps, place = inner + j - (wraps ? length : 0);
      if (index + j < count) epilogue.store(p, in_rows ? line : place, in_rows ? place : line, sum[j]);
    }
  } else if (in_rows) {
    store_sums<true>(epilogue, p, outer, inner, GEMM_UNIT_SUMS, sum);
  } else {
    store_sums<false>(epilogue, p, inner, outer, GEMM_UNIT_SUMS, sum);
  }
}

#define UNIT(name, type, T, rows, columns, threads, terms, across_a, across_b)                                     \
  template                                                                                                         \
      [[host_name("gemm_unit_" name                                                                                \
                  "_" type)]] [[kernel]] decltype(gemm_unit<T, rows, columns, threads, terms, across_a, across_b>) \
          gemm_unit<T, rows, columns, threads, terms, across_a, across_b>;
#define UNITS(name, type, T, rows, columns, threads, terms)             \
  UNIT("nn" name, type, T, rows, columns, threads, terms, false, false) \
  UNIT("nt" name, type, T, rows, columns, threads, terms, false, true)  \
  UNIT("tn" name, type, T, rows, columns, threads, terms, true, false)  \
  UNIT("tt" name, type, T, rows, columns, threads, terms, true, true)
#define ANY dynamic_length_v<int>
#define TYPE(type, T)                                                                                          \
  UNITS("_wide", type, T, GEMM_UNIT_ROWS, GEMM_UNIT_WIDE, GEMM_UNIT_WIDE_THREADS, ANY)                         \
  UNITS("", type, T, GEMM_UNIT_ROWS, GEMM_UNIT_COLUMNS, GEMM_UNIT_THREADS, ANY)                                \
  UNITS("_deep", type, T, GEMM_UNIT_ROWS, GEMM_UNIT_COLUMNS, GEMM_UNIT_WIDE_THREADS, ANY)                      \
  UNITS("_small", type, T, GEMM_UNIT_SMALL, GEMM_UNIT_SMALL, GEMM_UNIT_THREADS, ANY)                           \
  UNITS("_broad", type, T, GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_WIDE_THREADS, ANY)                    \
  UNITS("_many", type, T, GEMM_UNIT_ROWS, GEMM_UNIT_MANY, GEMM_UNIT_WIDE_THREADS, ANY)                         \
  UNITS("_several", type, T, GEMM_UNIT_ROWS, GEMM_UNIT_SEVERAL, GEMM_UNIT_WIDE_THREADS, ANY)                   \
  UNITS("_few", type, T, GEMM_UNIT_ROWS, GEMM_UNIT_FEW, GEMM_UNIT_WIDE_THREADS, ANY)                           \
  UNITS("_short", type, T, GEMM_UNIT_SMALL, GEMM_UNIT_COLUMNS, GEMM_UNIT_SHORT_THREADS, GEMM_UNIT_SHORT_TERMS) \
  UNITS("_short_small", type, T, GEMM_UNIT_SMALL, GEMM_UNIT_SMALL, GEMM_UNIT_THREADS, GEMM_UNIT_SHORT_TERMS)   \
  template [[host_name("gemm_unit_sum_" type)]] [[kernel]] decltype(gemm_unit_sum<T>) gemm_unit_sum<T>;
TYPE("half", half)
TYPE("bfloat", bfloat)

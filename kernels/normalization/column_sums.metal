// The sums of columns of float32, for gradients of parameters that all rows share. Kernels leave partial sums, one row
// of them for each chunk of their own rows, and this adds them up. There are no atomics, so that the order of the
// additions is always the same. The columns from `first` on go to a second result.
#include "common/sums.h"
#include "normalization/normalization.h"

template <typename W>
inline void put_sum(device W* first, device W* second, constant ColumnSumsParams& params, uint column, float sum) {
  if (column < params.first)
    first[column] = static_cast<W>(sum);
  else
    second[column - params.first] = static_cast<W>(sum);
}

// Few chunks: a thread for each column.
template <typename W>
kernel void column_sums_thread(device const float* partial [[buffer(0)]], device W* first [[buffer(1)]],
                               device W* second [[buffer(2)]], constant ColumnSumsParams& params [[buffer(3)]],
                               uint column [[thread_position_in_grid]]) {
  LongSum<float> sum;
  for (uint chunk = 0; chunk < params.chunks; ++chunk) sum.add(partial[ulong(chunk) * params.columns + column]);
  put_sum(first, second, params, column, sum.total());
}

// Many chunks: a threadgroup for 32 columns. Each of its simdgroups has every 16th chunk, some on their way at once.
constexpr constant uint kSimdgroups = 16;
constexpr constant uint kAtOnce = 17;

template <typename W>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void column_sums_block(
    device const float* partial [[buffer(0)]], device W* first [[buffer(1)]], device W* second [[buffer(2)]],
    constant ColumnSumsParams& params [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[kSimdgroups * 32];
  const uint column = min(group * 32 + lane, params.columns - 1);
  const ulong step = ulong(kSimdgroups) * params.columns;
  device const float* at = partial + ulong(simdgroup) * params.columns + column;
  float sum = 0.0f;
  for (uint from = simdgroup; from < params.chunks; from += kSimdgroups * kAtOnce) {
    float values[kAtOnce];
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i, at += step) values[i] = from + kSimdgroups * i < params.chunks ? *at : 0.0f;
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i) sum += values[i];
  }
  sums[simdgroup * 32 + lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup > 0 || group * 32 + lane >= params.columns) return;
  float total = 0.0f;
#pragma unroll
  for (uint i = 0; i < kSimdgroups; ++i) total += sums[i * 32 + lane];
  put_sum(first, second, params, column, total);
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_SUMS(types, T)                                \
  INSTANTIATE("column_sums_thread", types, column_sums_thread<T>) \
  INSTANTIATE("column_sums_block", types, column_sums_block<T>)

INSTANTIATE_SUMS("_float", float)
INSTANTIATE_SUMS("_half", half)
INSTANTIATE_SUMS("_bfloat", bfloat)

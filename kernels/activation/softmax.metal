// softmax and log_softmax over rows. T is the type of the input, U that of the output.
#include "common/running.h"
#include "activation/softmax_rows.h"

template <typename Op, typename T, typename U>
kernel void softmax_thread(device const T* x [[buffer(0)]], device U* y [[buffer(1)]],
                           constant SoftmaxParams& params [[buffer(2)]], uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  x += row * params.x_stride;
  y += ulong(row) * length;
  const float scale = params.scale;
  float maximum = -INFINITY;
  for (uint i = 0; i < length; ++i) maximum = max(maximum, scale * static_cast<float>(x[i]));
  LongSum<float> sum;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) part += exponential<U>(scale * static_cast<float>(x[i]) - maximum);
    sum.add(part);
  }
  const float norm = Op::norm(sum.total());
  for (uint i = 0; i < length; ++i) {
    const float t = scale * static_cast<float>(x[i]) - maximum;
    y[i] = static_cast<U>(Op::finish(Op::keep(t, exponential<U>(t)), norm));
  }
}

// Rows whose elements lie `inner` apart: a thread takes four neighbouring rows.
template <bool aligned, typename Op, typename T, typename U>
inline void columns(device const T* x, device U* y, constant SoftmaxParams& params, uint2 at) {
  const uint inner = params.inner;
  const uint column = at.x * 4;
  x += at.y * params.x_stride;
  y += at.y * ulong(params.length) * inner;
  Running<U, float4> running;
  for (uint i = 0; i < params.length; ++i)
    running.add(params.scale * load4<aligned>(x + ulong(i) * inner, column, inner, 0.0f));
  const float4 norm = Op::norm(running.sum.total());
  for (uint i = 0; i < params.length; ++i) {
    const float4 t = params.scale * load4<aligned>(x + ulong(i) * inner, column, inner, 0.0f) - running.maximum;
    store4<aligned>(y + ulong(i) * inner, column, inner, Op::finish(Op::keep(t, exponential<U>(t)), norm));
  }
}

template <typename Op, typename T, typename U>
kernel void softmax_columns(device const T* x [[buffer(0)]], device U* y [[buffer(1)]],
                            constant SoftmaxParams& params [[buffer(2)]], uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    columns<true, Op>(x, y, params, at);
  else
    columns<false, Op>(x, y, params, at);
}

// A row of the input and of the output, with the place that it has in memory.
template <typename T, typename U>
struct Row {
  device const T* x;
  device U* y;
  uint length;
  uint past;      // elements by which x begins past a multiple of 16 bytes
  bool together;  // so does y
  float scale;    // of x

  Row(device const T* x, device U* y, constant SoftmaxParams& params, ulong row)
      : x(x + row * params.x_stride),
        y(y + row * params.length),
        length(params.length),
        past((params.start + row * params.x_stride) % 16),
        together(params.together),
        scale(params.scale) {}
};

// One row in the registers of a team.
template <bool aligned, typename Op, uint N, typename T, typename U, typename Team>
inline void row_in_registers(Row<T, U> row, Team team) {
  const Edges<aligned, T> edges(row.past, row.length, team.thread_index);
  const Share<T, N> share(team.thread_index, team.threads);
  float4 v[N];
  share.template load<true>(v, row.x + edges.head, edges.body, -INFINITY);
  const float edge = row.scale * edges.load(row.x, -INFINITY);
  float maximum = edge;
  for (uint n = 0; n < N; ++n) {
    v[n] *= row.scale;
    maximum = max(maximum, max4(v[n]));
  }
  maximum = team.maximum(maximum, 0);
  const float edge_t = edge - maximum;
  const float edge_e = exponential<U>(edge_t);
  float sum = aligned ? 0.0f : edge_e;
  for (uint n = 0; n < N; ++n) {
    const float4 t = v[n] - maximum;
    const float4 e = exponential<U>(t);
    sum += sum4(e);
    v[n] = Op::keep(t, e);
  }
  const float norm = Op::norm(team.sum(sum, 1));
  for (uint n = 0; n < N; ++n) v[n] = Op::finish(v[n], norm);
  store_body<aligned>(share, v, row.y + edges.head, edges.body, row.together);
  edges.store(row.y, Op::finish(Op::keep(edge_t, edge_e), norm));
}

template <typename Op, typename T, typename U, uint N>
kernel void softmax_simd(device const T* x [[buffer(0)]], device U* y [[buffer(1)]],
                         constant SoftmaxParams& params [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong index = ulong(group) * simdgroups + simdgroup;
  if (index >= params.rows) return;
  const Row<T, U> row(x, y, params, index);
  if (params.aligned)
    row_in_registers<true, Op, N>(row, Simdgroup(lane));
  else
    row_in_registers<false, Op, N>(row, Simdgroup(lane));
}

template <typename Op, typename T, typename U, uint N>
[[kernel]] [[max_total_threads_per_threadgroup(64 * N)]] void softmax_block(
    device const T* x [[buffer(0)]], device U* y [[buffer(1)]], constant SoftmaxParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  const Row<T, U> row(x, y, params, group);
  if (params.aligned)
    row_in_registers<true, Op, N>(row, team);
  else
    row_in_registers<false, Op, N>(row, team);
}

// A row of any length in two walks: the maximum and the sum of the exponentials, and the results. Both go through the
// part of the body that a threadgroup has, and the edges where it has them.

template <bool aligned, uint N, typename T, typename U>
inline float2 walk_sum(Row<T, U> row, Edges<aligned, T> edges, Part part, bool first, Threadgroup team) {
  Running<U, float> running;
  const float edge = first ? row.scale * edges.load(row.x, -INFINITY) : -INFINITY;
  if (!aligned) running.add(edge);
  float4 v[N];
  for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
    Share<T, N>(team.thread_index, team.threads, start).template load<true>(v, row.x + edges.head, part.end, -INFINITY);
    for (uint n = 0; n < N; ++n) v[n] *= row.scale;
    add_all(running, v);
  }
  const float maximum = team.maximum(running.maximum, 0);
  running.raise(maximum);
  return float2(maximum, team.sum(running.sum.total(), 1));
}

template <bool aligned, typename Op, uint N, typename T, typename U>
inline void walk_results(Row<T, U> row, Edges<aligned, T> edges, Part part, bool first, float maximum, float sum,
                         Threadgroup team) {
  const float norm = Op::norm(sum);
  float4 v[N];
  for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    share.template load<true>(v, row.x + edges.head, part.end, -INFINITY);
    for (uint n = 0; n < N; ++n) {
      const float4 t = row.scale * v[n] - maximum;
      v[n] = Op::finish(Op::keep(t, exponential<U>(t)), norm);
    }
    store_body<aligned>(share, v, row.y + edges.head, part.end, row.together);
  }
  if (aligned || !first) return;
  const float t = row.scale * edges.load(row.x, -INFINITY) - maximum;
  edges.store(row.y, Op::finish(Op::keep(t, exponential<U>(t)), norm));
}

template <bool aligned, typename Op, typename T, typename U>
inline void long_row(Row<T, U> row, Threadgroup team) {
  const Edges<aligned, T> edges(row.past, row.length, team.thread_index);
  const Part part(edges.body);
  const float2 all = walk_sum<aligned, kLongStep<T>>(row, edges, part, true, team);
  walk_results<aligned, Op, kLongStep<T>>(row, edges, part, true, all.x, all.y, team);
}

template <typename Op, typename T, typename U>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void softmax_looped(
    device const T* x [[buffer(0)]], device U* y [[buffer(1)]], constant SoftmaxParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  const Row<T, U> row(x, y, params, group);
  if (params.aligned)
    long_row<true, Op>(row, team);
  else
    long_row<false, Op>(row, team);
}

// Few long rows: several threadgroups share one, and leave maximum and sum of their parts to a second dispatch, for
// results of type R.

template <bool aligned, typename T, typename U>
inline void split_sum(Row<T, U> row, device float2* parts, constant SoftmaxParams& params, uint2 group,
                      Threadgroup team) {
  const Edges<aligned, T> edges(row.past, row.length, team.thread_index);
  const Part part(edges.body, group.x, params.share);
  const float2 found = walk_sum<aligned, kSplitStep>(row, edges, part, group.x == 0, team);
  if (team.thread_index == 0) parts[group.y * params.splits + group.x] = found;
}

template <typename T, typename R>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void softmax_split_sum(
    device const T* x [[buffer(0)]], device float2* parts [[buffer(1)]], constant SoftmaxParams& params [[buffer(2)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Row<T, R> row(x, nullptr, params, group.y);
  if (params.aligned)
    split_sum<true>(row, parts, params, group, team);
  else
    split_sum<false>(row, parts, params, group, team);
}

template <bool aligned, typename Op, typename T, typename U>
inline void split_results(Row<T, U> row, device const float2* parts, constant SoftmaxParams& params, uint2 group,
                          Threadgroup team) {
  const float2 part =
      team.thread_index < params.splits ? parts[group.y * params.splits + team.thread_index] : float2(-INFINITY, 0.0f);
  const float maximum = team.maximum(part.x, 0);
  const float sum = team.sum(part.y * exp(part.x - Running<U, float>::base(maximum)), 1);
  const Edges<aligned, T> edges(row.past, row.length, team.thread_index);
  const Part mine(edges.body, group.x, params.share);
  walk_results<aligned, Op, kSplitStep>(row, edges, mine, group.x == 0, maximum, sum, team);
}

template <typename Op, typename T, typename U>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void softmax_split(
    device const T* x [[buffer(0)]], device U* y [[buffer(1)]], constant SoftmaxParams& params [[buffer(2)]],
    device const float2* parts [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Row<T, U> row(x, y, params, group.y);
  if (params.aligned)
    split_results<true, Op>(row, parts, params, group, team);
  else
    split_results<false, Op>(row, parts, params, group, team);
}

#define INSTANTIATE_TYPES(name, Op, types, T, U)                 \
  INSTANTIATE(name "_thread", types, softmax_thread<Op, T, U>)   \
  INSTANTIATE(name "_columns", types, softmax_columns<Op, T, U>) \
  INSTANTIATE(name "_simd1", types, softmax_simd<Op, T, U, 1>)   \
  INSTANTIATE(name "_simd4", types, softmax_simd<Op, T, U, 4>)   \
  INSTANTIATE(name "_block4", types, softmax_block<Op, T, U, 4>) \
  INSTANTIATE(name "_block8", types, softmax_block<Op, T, U, 8>) \
  INSTANTIATE(name "_looped", types, softmax_looped<Op, T, U>)   \
  INSTANTIATE(name "_split", types, softmax_split<Op, T, U>)

INSTANTIATE_OP("softmax", Softmax)
INSTANTIATE_OP("log_softmax", LogSoftmax)

INSTANTIATE("softmax_split_sum", "_float", softmax_split_sum<float, float>)
INSTANTIATE("softmax_split_sum", "_half", softmax_split_sum<half, half>)
INSTANTIATE("softmax_split_sum", "_bfloat", softmax_split_sum<bfloat, bfloat>)
INSTANTIATE("softmax_split_sum", "_half_to_float", softmax_split_sum<half, float>)
INSTANTIATE("softmax_split_sum", "_bfloat_to_float", softmax_split_sum<bfloat, float>)

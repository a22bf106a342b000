// The derivatives of softmax and log_softmax over rows, from the output y and its gradient g. U is the type of both,
// T that of the input's gradient. All three are contiguous and begin at a multiple of 16 bytes, unless params.aligned
// is false in the columns variant, where that does not matter.
#include "common/sums.h"
#include "activation/softmax_rows.h"

template <typename Op, typename T, typename U>
kernel void softmax_backward_thread(device const U* g [[buffer(0)]], device const U* y [[buffer(1)]],
                                    device T* gx [[buffer(2)]], constant SoftmaxParams& params [[buffer(3)]],
                                    uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  g += ulong(row) * length;
  y += ulong(row) * length;
  gx += ulong(row) * length;
  LongSum<float> sum;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) part += Op::term(static_cast<float>(g[i]), static_cast<float>(y[i]));
    sum.add(part);
  }
  const float total = sum.total();
  for (uint i = 0; i < length; ++i) {
    gx[i] = static_cast<T>(Op::template gradient<T>(static_cast<float>(g[i]), static_cast<float>(y[i]), total));
  }
}

template <bool aligned, typename Op, typename T, typename U>
inline void columns(device const U* g, device const U* y, device T* gx, constant SoftmaxParams& params, uint2 at) {
  const uint inner = params.inner;
  const uint column = at.x * 4;
  const ulong start = at.y * ulong(params.length) * inner;
  g += start;
  y += start;
  gx += start;
  LongSum<float4> sum;
  for (uint i = 0; i < params.length; ++i) {
    const ulong row = ulong(i) * inner;
    sum.add(Op::term(load4<aligned>(g + row, column, inner, 0.0f), load4<aligned>(y + row, column, inner, 0.0f)));
  }
  const float4 total = sum.total();
  for (uint i = 0; i < params.length; ++i) {
    const ulong row = ulong(i) * inner;
    const float4 gi = load4<aligned>(g + row, column, inner, 0.0f);
    const float4 yi = load4<aligned>(y + row, column, inner, 0.0f);
    store4<aligned>(gx + row, column, inner, Op::template gradient<T>(gi, yi, total));
  }
}

template <typename Op, typename T, typename U>
kernel void softmax_backward_columns(device const U* g [[buffer(0)]], device const U* y [[buffer(1)]],
                                     device T* gx [[buffer(2)]], constant SoftmaxParams& params [[buffer(3)]],
                                     uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    columns<true, Op>(g, y, gx, params, at);
  else
    columns<false, Op>(g, y, gx, params, at);
}

// A row of the three tensors.
template <typename T, typename U>
struct Row {
  device const U* g;
  device const U* y;
  device T* gx;
  uint length;
  uint past;  // elements by which it begins past a multiple of 16 bytes

  Row(device const U* g, device const U* y, device T* gx, constant SoftmaxParams& params, ulong row)
      : g(g + row * params.length),
        y(y + row * params.length),
        gx(gx + row * params.length),
        length(params.length),
        past(row * params.length % 16) {}
};

template <bool aligned, typename Op, uint N, typename T, typename U, typename Team>
inline void row_in_registers(Row<T, U> row, Team team) {
  const Edges<aligned, U> edges(row.past, row.length, team.thread_index);
  const Share<U, N> share(team.thread_index, team.threads);
  float4 g[N];
  float4 y[N];
  share.template load<true>(g, row.g + edges.head, edges.body, 0.0f);
  share.template load<true>(y, row.y + edges.head, edges.body, 0.0f);
  const float edge_g = edges.load(row.g, 0.0f);
  const float edge_y = edges.load(row.y, 0.0f);
  float total = aligned ? 0.0f : Op::term(edge_g, edge_y);
  for (uint n = 0; n < N; ++n) total += sum4(Op::term(g[n], y[n]));
  total = team.sum(total, 0);
  for (uint n = 0; n < N; ++n) g[n] = Op::template gradient<T>(g[n], y[n], total);
  share.template store<true>(g, row.gx + edges.head, edges.body);
  edges.store(row.gx, Op::template gradient<T>(edge_g, edge_y, total));
}

template <typename Op, typename T, typename U, uint N>
kernel void softmax_backward_simd(device const U* g [[buffer(0)]], device const U* y [[buffer(1)]],
                                  device T* gx [[buffer(2)]], constant SoftmaxParams& params [[buffer(3)]],
                                  uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                                  uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong index = ulong(group) * simdgroups + simdgroup;
  if (index >= params.rows) return;
  const Row<T, U> row(g, y, gx, params, index);
  if (params.aligned)
    row_in_registers<true, Op, N>(row, Simdgroup(lane));
  else
    row_in_registers<false, Op, N>(row, Simdgroup(lane));
}

template <typename Op, typename T, typename U, uint N>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void softmax_backward_block(
    device const U* g [[buffer(0)]], device const U* y [[buffer(1)]], device T* gx [[buffer(2)]],
    constant SoftmaxParams& params [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  const Row<T, U> row(g, y, gx, params, group);
  if (params.aligned)
    row_in_registers<true, Op, N>(row, team);
  else
    row_in_registers<false, Op, N>(row, team);
}

// A row of any length in two walks, as in softmax.metal.

template <bool aligned, typename Op, uint N, typename T, typename U>
inline float walk_total(Row<T, U> row, Edges<aligned, U> edges, Part part, bool first, Threadgroup team) {
  LongSum<float> total;
  if (!aligned && first) total.add(Op::term(edges.load(row.g, 0.0f), edges.load(row.y, 0.0f)));
  float4 g[N];
  float4 y[N];
  for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
    const Share<U, N> share(team.thread_index, team.threads, start);
    share.template load<true>(g, row.g + edges.head, part.end, 0.0f);
    share.template load<true>(y, row.y + edges.head, part.end, 0.0f);
    float4 sum = float4(0.0f);
    for (uint n = 0; n < N; ++n) sum += Op::term(g[n], y[n]);
    total.add(sum4(sum));
  }
  return team.sum(total.total(), 0);
}

template <bool aligned, typename Op, uint N, typename T, typename U>
inline void walk_gradients(Row<T, U> row, Edges<aligned, U> edges, Part part, bool first, float total,
                           Threadgroup team) {
  float4 g[N];
  float4 y[N];
  for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
    const Share<U, N> share(team.thread_index, team.threads, start);
    share.template load<true>(g, row.g + edges.head, part.end, 0.0f);
    share.template load<true>(y, row.y + edges.head, part.end, 0.0f);
    for (uint n = 0; n < N; ++n) g[n] = Op::template gradient<T>(g[n], y[n], total);
    share.template store<true>(g, row.gx + edges.head, part.end);
  }
  if (!aligned && first)
    edges.store(row.gx, Op::template gradient<T>(edges.load(row.g, 0.0f), edges.load(row.y, 0.0f), total));
}

template <bool aligned, typename Op, typename T, typename U>
inline void long_row(Row<T, U> row, Threadgroup team) {
  const Edges<aligned, U> edges(row.past, row.length, team.thread_index);
  const Part part(edges.body);
  const float total = walk_total<aligned, Op, kLongStep<U>>(row, edges, part, true, team);
  walk_gradients<aligned, Op, kLongStep<U>>(row, edges, part, true, total, team);
}

template <typename Op, typename T, typename U>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void softmax_backward_looped(
    device const U* g [[buffer(0)]], device const U* y [[buffer(1)]], device T* gx [[buffer(2)]],
    constant SoftmaxParams& params [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  const Row<T, U> row(g, y, gx, params, group);
  if (params.aligned)
    long_row<true, Op>(row, team);
  else
    long_row<false, Op>(row, team);
}

// Few long rows: several threadgroups share one, and leave the totals of their parts to a second dispatch.

template <bool aligned, typename Op, typename U>
inline void split_total(Row<float, U> row, device float* parts, constant SoftmaxParams& params, uint2 group,
                        Threadgroup team) {
  const Edges<aligned, U> edges(row.past, row.length, team.thread_index);
  const Part part(edges.body, group.x, params.share);
  const float total = walk_total<aligned, Op, kSplitStep>(row, edges, part, group.x == 0, team);
  if (team.thread_index == 0) parts[group.y * params.splits + group.x] = total;
}

template <typename Op, typename U>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void softmax_backward_split_total(
    device const U* g [[buffer(0)]], device const U* y [[buffer(1)]], device float* parts [[buffer(2)]],
    constant SoftmaxParams& params [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Row<float, U> row(g, y, nullptr, params, group.y);
  if (params.aligned)
    split_total<true, Op>(row, parts, params, group, team);
  else
    split_total<false, Op>(row, parts, params, group, team);
}

template <bool aligned, typename Op, typename T, typename U>
inline void split_gradients(Row<T, U> row, device const float* parts, constant SoftmaxParams& params, uint2 group,
                            Threadgroup team) {
  const bool present = team.thread_index < params.splits;
  const float total = team.sum(present ? parts[group.y * params.splits + team.thread_index] : 0.0f, 0);
  const Edges<aligned, U> edges(row.past, row.length, team.thread_index);
  const Part part(edges.body, group.x, params.share);
  walk_gradients<aligned, Op, kSplitStep>(row, edges, part, group.x == 0, total, team);
}

template <typename Op, typename T, typename U>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void softmax_backward_split(
    device const U* g [[buffer(0)]], device const U* y [[buffer(1)]], device T* gx [[buffer(2)]],
    constant SoftmaxParams& params [[buffer(3)]], device const float* parts [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Row<T, U> row(g, y, gx, params, group.y);
  if (params.aligned)
    split_gradients<true, Op>(row, parts, params, group, team);
  else
    split_gradients<false, Op>(row, parts, params, group, team);
}

#define INSTANTIATE_TYPES(name, Op, types, T, U)                                   \
  INSTANTIATE(name "_backward_thread", types, softmax_backward_thread<Op, T, U>)   \
  INSTANTIATE(name "_backward_columns", types, softmax_backward_columns<Op, T, U>) \
  INSTANTIATE(name "_backward_simd1", types, softmax_backward_simd<Op, T, U, 1>)   \
  INSTANTIATE(name "_backward_simd4", types, softmax_backward_simd<Op, T, U, 4>)   \
  INSTANTIATE(name "_backward_block4", types, softmax_backward_block<Op, T, U, 4>) \
  INSTANTIATE(name "_backward_looped", types, softmax_backward_looped<Op, T, U>)   \
  INSTANTIATE(name "_backward_split", types, softmax_backward_split<Op, T, U>)

INSTANTIATE_OP("softmax", Softmax)
INSTANTIATE_OP("log_softmax", LogSoftmax)

#define INSTANTIATE_TOTAL(name, Op)                                                            \
  INSTANTIATE(name "_backward_split_total", "_float", softmax_backward_split_total<Op, float>) \
  INSTANTIATE(name "_backward_split_total", "_half", softmax_backward_split_total<Op, half>)   \
  INSTANTIATE(name "_backward_split_total", "_bfloat", softmax_backward_split_total<Op, bfloat>)

INSTANTIATE_TOTAL("softmax", Softmax)
INSTANTIATE_TOTAL("log_softmax", LogSoftmax)

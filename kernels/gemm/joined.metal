// Products of one row and up to three matrices, whose columns lie next to each other in the result: what reads the
// same row is one dispatch. With a norm, the row is normalized on the way: its squares are added up beside the
// products, and their root divides the sums. With a gate, the columns of the first matrix let those of the second one
// through.
//
// A simdgroup has two columns, or one of each matrix with a gate. Where there are few columns, several simdgroups share
// their terms.
#include "common/pack.h"
#include "common/rows.h"
#include "gemm/epilogue.h"
#include "gemm/gemm.h"

// Where a simdgroup's columns are. Addresses are chosen and not looked up, since arrays that are indexed by what only
// the GPU knows would lie in memory.
template <typename T>
struct JoinedLines {
  device const T* lines[JOINED_LINES];
  device const T* biases[JOINED_LINES];
  bool biased[JOINED_LINES];
  uint first, count;  // columns of the result
};

template <typename T>
inline JoinedLines<T> lines_of(constant JoinedParams& p, device const T* a, device const T* b, device const T* c,
                               device const T* bias_a, device const T* bias_b, device const T* bias_c, uint set) {
  JoinedLines<T> found;
  if (p.gate) {
    const uint column = min(set, p.columns[0] - 1);
    found.lines[0] = a + column * p.strides[0], found.lines[1] = b + column * p.strides[1];
    found.biases[0] = bias_a + column, found.biases[1] = bias_b + column;
    found.biased[0] = p.has_bias[0], found.biased[1] = p.has_bias[1];
    found.first = column, found.count = set < p.columns[0] ? 1 : 0;
    return found;
  }
  uint columns = p.columns[0], before = 0;
  int64_t stride = p.strides[0];
  device const T* matrix = a;
  device const T* bias = bias_a;
  bool biased = p.has_bias[0];
  const uint of_a = (columns + JOINED_LINES - 1) / JOINED_LINES;
  if (set >= of_a && p.columns[1]) {
    set -= of_a, before = columns, columns = p.columns[1];
    stride = p.strides[1], matrix = b, bias = bias_b, biased = p.has_bias[1];
    const uint of_b = (columns + JOINED_LINES - 1) / JOINED_LINES;
    if (set >= of_b && p.columns[2]) {
      set -= of_b, before += columns, columns = p.columns[2];
      stride = p.strides[2], matrix = c, bias = bias_c, biased = p.has_bias[2];
    }
  }
  const uint column = set * JOINED_LINES;
  found.first = before + column, found.count = column < columns ? min(columns - column, uint(JOINED_LINES)) : 0;
#pragma unroll
  for (uint n = 0; n < JOINED_LINES; ++n) {
    const uint at = min(column + n, columns - 1);
    found.lines[n] = matrix + at * stride, found.biases[n] = bias + at, found.biased[n] = biased;
  }
  return found;
}

inline float add_products(float4 a, float4 b, float sum) { return sum + sum4(a * b); }

template <typename T>
inline Pack<T> pack_of(device const T* row, uint term) {
  return *reinterpret_cast<device const Pack<T>*>(row + term);
}

// Adds the products of some packs' terms to two sums, and with a norm the row's squares to a third. Where all lanes
// have such packs, all loads are under way at once: a barrier keeps the compiler from making one after the other, for
// which fewer registers would do.
template <bool kNorm, uint kPacks, bool kAllLanes, uint COUNT, typename T>
inline void add_packs(thread float (&sums)[COUNT], device const T* x, device const T* norm, float offset,
                      thread const JoinedLines<T>& columns, uint term, uint step) {
  Pack<T> loaded[kPacks][JOINED_LINES], row[kPacks], weight[kPacks];
#pragma unroll
  for (uint i = 0; i < kPacks; ++i) {
#pragma unroll
    for (uint n = 0; n < JOINED_LINES; ++n) loaded[i][n] = pack_of(columns.lines[n], term + i * step);
    row[i] = pack_of(x, term + i * step);
    if (kNorm) weight[i] = pack_of(norm, term + i * step);
  }
  if (kAllLanes) simdgroup_barrier(mem_flags::mem_none);
#pragma unroll
  for (uint i = 0; i < kPacks; ++i) {
    float4 values[kPackVectors<T>], w[kPackVectors<T>];
    unpack(row[i], values);
    if (kNorm) {
      unpack(weight[i], w);
#pragma unroll
      for (uint v = 0; v < kPackVectors<T>; ++v) {
        sums[JOINED_LINES] = add_products(values[v], values[v], sums[JOINED_LINES]);
        values[v] *= w[v] + offset;
      }
    }
#pragma unroll
    for (uint n = 0; n < JOINED_LINES; ++n) {
      unpack(loaded[i][n], w);
#pragma unroll
      for (uint v = 0; v < kPackVectors<T>; ++v) sums[n] = add_products(values[v], w[v], sums[n]);
    }
  }
}

template <bool kNorm, uint COUNT, typename T>
inline void add_term(thread float (&sums)[COUNT], device const T* row, device const T* norm, float offset,
                     thread const JoinedLines<T>& columns, uint term) {
  float x = static_cast<float>(row[term]);
  if (kNorm) {
    sums[JOINED_LINES] = fma(x, x, sums[JOINED_LINES]);
    x *= static_cast<float>(norm[term]) + offset;
  }
#pragma unroll
  for (uint n = 0; n < JOINED_LINES; ++n) sums[n] = fma(x, static_cast<float>(columns.lines[n][term]), sums[n]);
}

template <typename T, bool kNorm>
[[kernel]] [[max_total_threads_per_threadgroup(32 * JOINED_SIMDGROUPS)]] void joined_linear(
    device const T* x [[buffer(0)]], device const T* a [[buffer(1)]], device const T* b [[buffer(2)]],
    device const T* c [[buffer(3)]], device const T* bias_a [[buffer(4)]], device const T* bias_b [[buffer(5)]],
    device const T* bias_c [[buffer(6)]], device const T* norm [[buffer(7)]], device const T* residual [[buffer(8)]],
    device T* result [[buffer(9)]], constant JoinedParams& p [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr uint kSums = kNorm ? 2 * JOINED_LINES : JOINED_LINES;  // a power of two
  threadgroup float shared[JOINED_SIMDGROUPS][kSums];
  const uint shift = ctz(p.share), part = simdgroup & (p.share - 1);
  const JoinedLines<T> columns =
      lines_of(p, a, b, c, bias_a, bias_b, bias_c, group * (simdgroups >> shift) + (simdgroup >> shift));
  float sums[kSums] = {};

  if (p.packs) {
    constexpr uint kLanes = 32 * kPackElements<T>;  // terms that lanes have side by side
    const uint step = kLanes * p.share, own = lane * kPackElements<T>;
    uint term = part * kLanes;
    for (; term + 2 * step + kLanes <= p.terms; term += 3 * step)
      add_packs<kNorm, 3, true>(sums, x, norm, p.offset, columns, term + own, step);
    if (term + step + kLanes <= p.terms) {
      add_packs<kNorm, 2, true>(sums, x, norm, p.offset, columns, term + own, step);
      term += 2 * step;
    }
    for (; term + own < p.terms; term += step)
      add_packs<kNorm, 1, false>(sums, x, norm, p.offset, columns, term + own, step);
  } else {
    for (uint term = part * 32 + lane; term < p.terms; term += 32 * p.share)
      add_term<kNorm>(sums, x, norm, p.offset, columns, term);
  }

  const float sum = simd_sums(sums, lane);
  if (lane % (32 / kSums) == 0) shared[simdgroup][lane / (32 / kSums)] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (part != 0 || lane >= columns.count) return;
  float values[JOINED_LINES + 1] = {};
  for (uint s = simdgroup; s < simdgroup + p.share; ++s)
#pragma unroll
    for (uint n = 0; n < JOINED_LINES + kNorm; ++n) values[n] += shared[s][n];
  const float scale = kNorm ? rsqrt(values[JOINED_LINES] / static_cast<float>(p.terms) + p.eps) : 1.0f;
#pragma unroll
  for (uint n = 0; n < JOINED_LINES; ++n)
    values[n] = fma(values[n], scale, columns.biased[n] ? static_cast<float>(*columns.biases[n]) : 0.0f);
  float value = p.gate ? activated<T>(values[0], p.gate) * values[1] : lane == 0 ? values[0] : values[1];
  if (p.has_residual) value += static_cast<float>(residual[columns.first + lane]);
  result[columns.first + lane] = static_cast<T>(value);
}

#define INSTANTIATE_AS(name, T, ...) \
  template [[host_name(name #T)]] [[kernel]] decltype(joined_linear<T, __VA_ARGS__>) joined_linear<T, __VA_ARGS__>;
#define INSTANTIATE(T) INSTANTIATE_AS("joined_linear_", T, false) INSTANTIATE_AS("joined_linear_norm_", T, true)
INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)

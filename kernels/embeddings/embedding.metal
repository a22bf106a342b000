// Rows of a table, by index, and their sums, means and maxima in bags of indices.
#include "common/rows.h"
#include "embeddings/embedding.h"

// Rows are copied in words of 16, 4 or 2 bytes. A row that the table does not have is all ones, which is NaN in
// float32, float16 and bfloat16.
template <typename Word>
kernel void embedding_rows(device const Word* table [[buffer(0)]], device const int* indices [[buffer(1)]],
                           device Word* out [[buffer(2)]], constant EmbeddingParams& params [[buffer(3)]],
                           uint2 at [[thread_position_in_grid]]) {
  const long index = params.wide ? reinterpret_cast<device const long*>(indices)[at.y] : long(indices[at.y]);
  Word word = Word(~0u);
  if (index >= 0 && index < params.rows) word = table[index * params.depth + at.x];
  out[ulong(at.y) * params.depth + at.x] = word;
}

// A thread of a bag has 16 bytes of its result, or four elements.

// Rows that are on their way at once.
constexpr constant uint kAtOnce = 4;

struct Bag {
  uint begin, end;
  bool wrong;  // its offsets descend, or are not among the places of indices, or leave out the first of these

  Bag(device const long* offsets, constant EmbeddingBagParams& params, uint bag) {
    const long last = params.count, first = offsets[bag], next = bag + 1 < params.offsets ? offsets[bag + 1] : last;
    wrong = first < 0 || next < first || next > last || (bag == 0 && first > 0);
    begin = wrong ? 0 : first;
    end = wrong ? 0 : next;
  }
};

// Elements of a row that a thread has, as float4s: 16 bytes of rows that are `aligned`.
template <bool aligned, typename T>
constexpr constant uint kFours = aligned && sizeof(T) == 2 ? 2 : 1;

template <bool aligned, typename T>
inline void bag_of_rows(device const T* table, device const long* indices, device const long* offsets,
                        device const T* factors, device T* out, device long* sizes, device long* maxima,
                        constant EmbeddingBagParams& params, uint2 at) {
  constexpr uint R = kFours<aligned, T>;
  const uint depth = params.depth;
  const Share<T, R> share(at.x, 0);  // a run of its own
  const bool max_wanted = params.mode == EMBEDDING_MAX;
  const Bag bag(offsets, params, at.y);
  float4 result[R];
  uint4 chosen[R];  // the places of the maxima's indices
#pragma unroll
  for (uint r = 0; r < R; ++r) {
    result[r] = float4(bag.wrong ? NAN : 0.0f);
    chosen[r] = uint4(0);
  }
  uint size = 0;
  for (uint start = bag.begin; start < bag.end; start += kAtOnce) {
    float4 v[kAtOnce][R];
    bool present[kAtOnce];
#pragma unroll
    for (uint k = 0; k < kAtOnce; ++k) {
      const uint place = min(start + k, bag.end - 1);
      const long index = indices[place];
      const bool known = ulong(index) < ulong(params.rows);                     // no negative one is
      present[k] = start + k < bag.end && !(known && index == params.padding);  // there may be no padding: it is -1
      share.template load<aligned>(v[k], table + (known ? index : 0) * depth, depth, 0.0f);
      const float factor = known ? params.weighted ? static_cast<float>(factors[place]) : 1.0f : NAN;
#pragma unroll
      for (uint r = 0; r < R; ++r) v[k][r] *= factor;
    }
#pragma unroll
    for (uint k = 0; k < kAtOnce; ++k) {
      if (!present[k]) continue;
#pragma unroll
      for (uint r = 0; r < R; ++r) {
        if (max_wanted) {
          const bool4 larger = size == 0 || v[k][r] > result[r] || v[k][r] != v[k][r];
          result[r] = select(result[r], v[k][r], larger);
          chosen[r] = select(chosen[r], uint4(start + k), larger);
        } else {
          result[r] += v[k][r];
        }
      }
      ++size;
    }
  }
#pragma unroll
  for (uint r = 0; r < R; ++r) {
    if (params.mode == EMBEDDING_MEAN && size > 0) result[r] /= float(size);
  }
  share.template store<aligned>(result, out + ulong(at.y) * depth, depth);
  if (at.x == 0) sizes[at.y] = size;
  if (!max_wanted) return;
#pragma unroll
  for (uint r = 0; r < R; ++r) {
    for (uint k = 0; k < 4; ++k) {
      const uint column = share.at(r) + k;
      if (column < depth) maxima[ulong(at.y) * depth + column] = size > 0 ? indices[chosen[r][k]] : -1l;
    }
  }
}

template <typename T>
kernel void embedding_bag(device const T* table [[buffer(0)]], device const long* indices [[buffer(1)]],
                          device const long* offsets [[buffer(2)]], device const T* factors [[buffer(3)]],
                          device T* out [[buffer(4)]], device long* sizes [[buffer(5)]],
                          device long* maxima [[buffer(6)]], constant EmbeddingBagParams& params [[buffer(7)]],
                          uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    bag_of_rows<true>(table, indices, offsets, factors, out, sizes, maxima, params, at);
  else
    bag_of_rows<false>(table, indices, offsets, factors, out, sizes, maxima, params, at);
}

// The bag of each index: the last one that begins at or before it. Where offsets are wrong, an index may have none: -1.
[[kernel]] void embedding_bag_samples(device const long* offsets [[buffer(0)]], device long* bags [[buffer(1)]],
                                      constant EmbeddingBagParams& params [[buffer(2)]],
                                      uint place [[thread_position_in_grid]]) {
  uint low = 0, high = params.bags;
  while (high - low > 1) {
    const uint middle = (low + high) / 2;
    if (offsets[middle] <= long(place))
      low = middle;
    else
      high = middle;
  }
  const bool inside = offsets[low] <= long(place) && (low + 1 >= params.offsets || long(place) < offsets[low + 1]);
  bags[place] = inside ? long(low) : -1l;
}

// The derivative by an index's factor: the product of its row and of its bag's gradient. A simdgroup has an index.
template <typename T>
kernel void embedding_bag_factors(device const T* grad [[buffer(0)]], device const T* table [[buffer(1)]],
                                  device const long* indices [[buffer(2)]], device const long* bags [[buffer(3)]],
                                  device T* gradient [[buffer(4)]], constant EmbeddingBagParams& params [[buffer(5)]],
                                  uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                                  uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint place = group * simdgroups + simdgroup;
  if (place >= params.count) return;
  const long index = indices[place], bag = bags[place];
  float sum = 0.0f;
  if (index != params.padding && index >= 0 && index < params.rows && bag >= 0 && bag < params.bags) {
    for (uint i = lane; i < params.depth; i += 32)
      sum += static_cast<float>(grad[bag * params.depth + i]) * static_cast<float>(table[index * params.depth + i]);
  }
  sum = simd_sum(sum);
  if (lane == 0) gradient[place] = static_cast<T>(sum);
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

INSTANTIATE("embedding_16", embedding_rows<uint4>)
INSTANTIATE("embedding_4", embedding_rows<uint>)
INSTANTIATE("embedding_2", embedding_rows<ushort>)

#define INSTANTIATE_TYPE(suffix, T)                      \
  INSTANTIATE("embedding_bag_" suffix, embedding_bag<T>) \
  INSTANTIATE("embedding_bag_factors_" suffix, embedding_bag_factors<T>)

INSTANTIATE_TYPE("float", float)
INSTANTIATE_TYPE("half", half)
INSTANTIATE_TYPE("bfloat", bfloat)

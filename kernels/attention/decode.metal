// Attention of few queries to many keys. Memory's speed is the limit, so every key and value is read once for all query
// heads that share it.
//
// A threadgroup has R rows (queries times the heads of a group) and a part of the keys, of which each simdgroup takes
// every few. A group of its lanes has a key: lane i has vectors i, i + lanes … of it, and the same vectors of each
// row's result. Running maxima and sums are those of a group of lanes until the end, where all become one. Where
// several threadgroups share the keys, merge.metal merges their results.
#include "attention/walk.h"

constexpr constant uint kMaxSimdgroups = 4;

// D and DV: the largest sizes of a head. T: the type of keys and values. Narrow kernels are for threads with at most
// 128 registers, as Apple's GPUs have them: more lanes have a key, so that each has fewer of a row's results.
template <typename T, uint D, uint DV, uint R, bool kNarrow>
struct DecodeShape {
  static constexpr constant uint kVector = 16 / sizeof(T);
  static constexpr constant uint kBytes = D * sizeof(T);
  static constexpr constant uint kLanes =  // that have a key
      kNarrow ? (D <= 256 ? D / 8 : 32)
              : (kBytes <= 256   ? 8
                 : kBytes <= 512 ? 16
                                 : 32);
  static constexpr constant uint kTogether = 32 / kLanes;  // keys that a simdgroup has at a time
  // Keys of a lane whose loads are under way at once. Those of one row are short programs, and have registers for more.
  static constexpr constant uint kAheadOfOne = kNarrow ? 2 : kBytes <= 128 ? 8 : 4;
  static constexpr constant uint kAheadOfMore = !kNarrow && (kBytes <= 1024 || sizeof(T) == 2) ? 2 : 1;
  static constexpr constant uint kAhead = R == 1 ? kAheadOfOne : kAheadOfMore;
  static constexpr constant bool kEarly = R < 8;  // there are registers to load the next keys into meanwhile
  static constexpr constant uint kKeyVectors = (D / kVector + kLanes - 1) / kLanes;
  static constexpr constant uint kValueVectors = (DV / kVector + kLanes - 1) / kLanes;
  static constexpr constant uint kPadded = kKeyVectors * kLanes * kVector;
  static constexpr constant uint kPaddedValue = kValueVectors * kLanes * kVector;
  // Rows whose results the simdgroups merge at a time.
  static constexpr constant uint kFits = 4096 / (kMaxSimdgroups * kPaddedValue);
  static constexpr constant uint kMerged = kFits < R ? kFits : R;
  static constexpr constant uint kMergedFloats = kMerged * kMaxSimdgroups * kPaddedValue;
  static constexpr constant uint kShared = R * kPadded > kMergedFloats ? R * kPadded : kMergedFloats;
};

// Adds the results of groups of LANES lanes that are up to ACROSS lanes apart. Half of the groups go on with half of
// the first COUNT rows: each ends with some of its own, the first group with the first ones. All end with the same row
// where there is one.
template <uint ACROSS, uint LANES, uint COUNT, uint R, uint N>
inline void merge_groups(thread float4 (&result)[R][N], uint lane) {
  if constexpr (ACROSS >= LANES && COUNT == 1) {
#pragma unroll
    for (uint n = 0; n < N; ++n) result[0][n] += simd_shuffle_xor(result[0][n], static_cast<ushort>(ACROSS));
    merge_groups<ACROSS / 2, LANES, 1>(result, lane);
  } else if constexpr (ACROSS >= LANES) {
    const bool4 upper = bool4((lane & ACROSS) != 0);
#pragma unroll
    for (uint r = 0; r < COUNT / 2; ++r)
#pragma unroll
      for (uint n = 0; n < N; ++n) {
        const float4 low = result[r][n], high = result[r + COUNT / 2][n];
        result[r][n] =
            select(low, high, upper) + simd_shuffle_xor(select(high, low, upper), static_cast<ushort>(ACROSS));
      }
    merge_groups<ACROSS / 2, LANES, COUNT / 2>(result, lane);
  }
}

// Only general kernels know masks, soft caps, and rows that cannot be loaded by vectors. A kernel for up to 512 threads
// has at most 128 registers a thread, so that four threadgroups of 128 threads share a core.
template <typename T, uint D, uint DV, uint R, bool kNarrow, bool kGeneral>
[[kernel]][[max_total_threads_per_threadgroup(D == 64 && R == 1 && !kNarrow ? 512 : 32 * kMaxSimdgroups)]] void
attention_decode(device const uchar* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
                 device const uchar* mask [[buffer(3)]], device const uchar* sinks [[buffer(4)]],
                 device const int* qo_indptr [[buffer(5)]], device const int* kv_indptr [[buffer(6)]],
                 device const int* kv_indices [[buffer(7)]], device const int* kv_last_page_len [[buffer(8)]],
                 device const int* mask_indptr [[buffer(9)]], device uchar* out [[buffer(10)]],
                 device float* lse [[buffer(11)]], constant AttentionDecodeParams& params [[buffer(12)]],
                 uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                 uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  using S = DecodeShape<T, D, DV, R, kNarrow>;
  constexpr uint kQuads = S::kVector / 4;  // float4s of a vector
  alignas(16) threadgroup float shared[S::kShared];
  threadgroup float maxima[kMaxSimdgroups * R];
  threadgroup float sums[kMaxSimdgroups * R];
  threadgroup float weights[kMaxSimdgroups * R];
  threadgroup int positions[R];
  threadgroup ulong query_rows[R];
  threadgroup ulong mask_rows[R];
  threadgroup ulong out_rows[R];

  // What comes before the second call costs no time where this kernel begins early: walk() makes it.
  if (params.ragged || params.key_layout != KEYS_EACH) metalcore_await_earlier_kernels(0);
  const uint split = group.y / params.kv_heads;
  const TileRows rows =
      find_rows<R>(params.first_tile + group.x, group.z, group.y % params.kv_heads, params, qo_indptr, lane);
  if (rows.request == params.batch) return;
  const KeyRows keys(rows.request, rows.kv_head, params, kv_indptr, kv_last_page_len);
  const uint simdgroups = threads.x / 32;
  const uint step = simdgroups * S::kTogether * S::kAhead;
  const Seen seen = find_keys(rows, keys.length, split, S::kTogether * S::kAhead, params);

  const uint part = lane % S::kLanes;
  float4 result[R][S::kValueVectors * kQuads];
#pragma unroll
  for (uint r = 0; r < R; ++r)
#pragma unroll
    for (uint n = 0; n < S::kValueVectors * kQuads; ++n) result[r][n] = float4(0.0f);

  const uint first = simdgroup * S::kTogether;
  Running running = {-INFINITY, -INFINITY, 0.0f};
  const RowPlaces places = {positions, query_rows, mask_rows, out_rows};
  threadgroup Pack<float>* const queries = reinterpret_cast<threadgroup Pack<float>*>(shared);
  if ((kNarrow && R > 1) || (kGeneral && params.general))
    walk<kGeneral, true, T, S, R>(result, running, seen, first, simdgroups * S::kTogether, rows, keys, split, q, k, v,
                                  mask, mask_indptr, kv_indices, queries, places, params, thread_index, threads.x,
                                  lane);
  else if (params.key_layout == KEYS_PAGED)
    walk<false, true, T, S, R>(result, running, seen, first * S::kAhead, step, rows, keys, split, q, k, v, mask,
                               mask_indptr, kv_indices, queries, places, params, thread_index, threads.x, lane);
  else
    walk<false, false, T, S, R>(result, running, seen, first * S::kAhead, step, rows, keys, split, q, k, v, mask,
                                mask_indptr, kv_indices, queries, places, params, thread_index, threads.x, lane);

  // Threadgroups of a later kernel that begin here would be dealt to the cores that end first.
  if (!params.alone) metalcore_begin_later_kernels(0);
  // The groups of a simdgroup's lanes become one, first each row's softmax.
  constexpr uint kRowLanes = S::kLanes / R;
  float top = running.largest;
#pragma unroll
  for (uint across = 1; across < kRowLanes; across *= 2)
    top = max(top, simd_shuffle_xor(top, static_cast<ushort>(across)));
#pragma unroll
  for (uint across = S::kLanes; across < 32; across *= 2)
    top = max(top, simd_shuffle_xor(top, static_cast<ushort>(across)));
  const float factor = fast::exp2(running.reference - base_of(top));
  float sum = running.sum * factor;
#pragma unroll
  for (uint across = 1; across < kRowLanes; across *= 2) sum += simd_shuffle_xor(sum, static_cast<ushort>(across));
#pragma unroll
  for (uint across = S::kLanes; across < 32; across *= 2) sum += simd_shuffle_xor(sum, static_cast<ushort>(across));
  if (lane < S::kLanes && part % kRowLanes == 0) {
    maxima[simdgroup * R + part / kRowLanes] = top;
    sums[simdgroup * R + part / kRowLanes] = sum;
  }
#pragma unroll
  for (uint r = 0; r < R; ++r) {
    const float of_row = simd_shuffle(factor, static_cast<ushort>((lane & ~(S::kLanes - 1)) | (r * kRowLanes)));
#pragma unroll
    for (uint n = 0; n < S::kValueVectors * kQuads; ++n) result[r][n] *= of_row;
  }
  constexpr uint kOwnRows = R > S::kTogether ? R / S::kTogether : 1;
  merge_groups<16, S::kLanes, R>(result, lane);

  // And so do the simdgroups.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < R * simdgroups && thread_index % R < rows.count) {
    const uint number = thread_index % R, row = rows.first + number;
    weights[thread_index] = merge_softmax<R, kMaxSimdgroups>(
        maxima, sums, simdgroups, thread_index / R, number, head_of(rows, row, params), sinks,
        thread_index < R ? reinterpret_cast<device Number<float>*>(lse) + logarithm_of(rows, row, split, params)
                         : nullptr,
        params);
  }
#pragma unroll
  for (uint first_merged = 0; first_merged < R; first_merged += S::kMerged) {
    if (first_merged) threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint r = 0; r < kOwnRows; ++r) {
      const uint row = lane / S::kLanes * kOwnRows + r;
      if (row < first_merged || row >= first_merged + S::kMerged) continue;
#pragma unroll
      for (uint n = 0; n < S::kValueVectors; ++n)
#pragma unroll
        for (uint i = 0; i < kQuads; ++i)
          reinterpret_cast<threadgroup Pack<float>*>(
              shared)[((simdgroup * S::kMerged + row - first_merged) * S::kPaddedValue +
                       (part + n * S::kLanes) * S::kVector) /
                          4 +
                      i]
              .words = as_type<uint4>(result[r][n * kQuads + i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 4
    for (uint i = thread_index; i < S::kMerged * S::kPaddedValue; i += threads.x) {
      const uint row = first_merged + i / S::kPaddedValue;
      const uint element = i % S::kPaddedValue;
      if (row >= rows.count || element >= params.value_size) continue;
      float value = 0.0f;
#pragma unroll
      for (uint other = 0; other < kMaxSimdgroups; ++other)
        if (other < simdgroups) value += weights[other * R + row] * shared[other * S::kMerged * S::kPaddedValue + i];
      store_number(out, out_rows[row] + element, params.out_type, value);
    }
  }
}

// Names have the largest head size that a kernel takes, and its rows.
#define INSTANTIATE(name, T, D, DV, R, ...)                         \
  template [[host_name("attention_decode_" name #D "x" #R "_" #T)]] \
  [[kernel]] decltype(attention_decode<T, D, DV, R, __VA_ARGS__>) attention_decode<T, D, DV, R, __VA_ARGS__>;
#define INSTANTIATE_SIZES(T)                    \
  INSTANTIATE("", T, 64, 64, 1, false, false)   \
  INSTANTIATE("", T, 64, 64, 4, false, false)   \
  INSTANTIATE("", T, 64, 64, 8, false, true)    \
  INSTANTIATE("", T, 128, 128, 1, false, false) \
  INSTANTIATE("", T, 128, 128, 4, false, false) \
  INSTANTIATE("", T, 128, 128, 8, false, true)  \
  INSTANTIATE("", T, 256, 256, 1, false, false) \
  INSTANTIATE("", T, 256, 256, 4, false, false) \
  INSTANTIATE("", T, 256, 256, 8, false, true)  \
  INSTANTIATE("", T, 576, 512, 8, false, true)
#define INSTANTIATE_NARROW(name, T, general)       \
  INSTANTIATE(name, T, 64, 64, 1, true, general)   \
  INSTANTIATE(name, T, 128, 128, 1, true, general) \
  INSTANTIATE(name, T, 256, 256, 1, true, general) \
  INSTANTIATE(name, T, 64, 64, 4, true, general)   \
  INSTANTIATE(name, T, 128, 128, 4, true, general) \
  INSTANTIATE(name, T, 256, 256, 4, true, general) \
  INSTANTIATE(name, T, 576, 512, 4, true, general)
#define INSTANTIATE_KINDS(T)              \
  INSTANTIATE_SIZES(T)                    \
  INSTANTIATE_NARROW("narrow_", T, false) \
  INSTANTIATE_NARROW("narrow_general_", T, true)

INSTANTIATE_KINDS(float)
INSTANTIATE_KINDS(half)
INSTANTIATE_KINDS(bfloat)

// The walks of linear_scan.h, and what they need of each chunk.
#include "sequence/linear_scan.h"

// The scores scale k(j) q(i) of all heads that share q and k, which lie in rows of j, and the factors of each head.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void linear_scan_prepare(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const float* g [[buffer(2)]],
    device const float* weights [[buffer(3)]], device const int* ends [[buffer(4)]], device float* scores [[buffer(5)]],
    device float* factors [[buffer(6)]], constant DeltaRuleParams& params [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kWidth = 128 / sizeof(T), kPitch = kWidth + 16 / sizeof(T), kTerms = 4 / sizeof(T);
  alignas(16) threadgroup T keys[kChunk * kPitch];
  alignas(16) threadgroup T queries[kChunk * kPitch];
  const uint lane = thread_index % 32, own = thread_index / 32 * kOwn;
  const Place place = place_of(lane);
  const uint key_head = group % params.heads, repeats = params.value_heads / params.heads;
  const Span span = chunk_of(ends, params, group / params.heads);
  const uint count = span.end - span.begin;
  q += span.batch * params.q[0] + span.begin * params.q[1] + key_head * params.q[2];
  k += span.batch * params.k[0] + span.begin * params.k[1] + key_head * params.k[2];
  Fragments<float, 2, kChunk / 8> sums;
  clear(sums);
  for (uint first = 0; first < params.keys; first += kWidth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_rows<kWidth, kPitch>(keys, k, params.k[1], count, first, params.keys, params.wide, thread_index);
    fetch_rows<kWidth, kPitch>(queries, q, params.q[1], count, first, params.keys, params.wide, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint term = 0; term < kWidth; term += kTerms * 8) {
      Fragments<T, 2, kTerms> rows;
      RightFragments<T, kTerms, kChunk / 8> columns;
      load<kPitch>(rows, keys + own * kPitch + term);
      load_transposed<kPitch>(columns, queries + term);
      multiply(sums, rows, 0, columns);
    }
  }
  device float* const own_scores = scores + ulong(group) * kChunk * kChunk;
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
#pragma unroll
    for (uint n = 0; n < kChunk / 8; ++n)
      *reinterpret_cast<device float2*>(own_scores + (own + m * 8 + place.row) * kChunk + n * 8 + place.column) =
          elements(sums.at[m][n]) * params.scale;
  }
  for (uint n = thread_index; n < repeats; n += DELTA_THREADS) {
    const uint head = key_head * repeats + n;
    const ulong at = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
    device float* const own_factors = factors + (ulong(span.place) * params.value_heads + head) * 3 * kChunk;
    float sum = 0.0f, rest = 0.0f;
#pragma unroll 8
    for (uint i = 0; i < kChunk; ++i) {
      const float gate = params.has_gate && i < count ? finite_gate(g[at + ulong(i) * params.value_heads]) : 0.0f;
      const float term = gate + rest, next = sum + term, part = next - sum;
      rest = (sum - (next - part)) + (term - part);
      sum = next;
      own_factors[i] = sum;
      own_factors[kChunk + i] = rest;
      own_factors[2 * kChunk + i] = strength_of(weights + at, i, count, params);
    }
  }
}

// What a walk finds: the state that a segment adds, results, or what the derivative needs of a walk.
constexpr constant uint kAdded = 0, kResults = 1, kDerivative = 2;

// BACK walks against time: `reading` and `learned` are k and q, `values` are the gradients of o, and `others` are v.
// The derivative gets what others and what the state reads have in common at each position (`dots`), and S before
// each step, or D behind each chunk (`kept`). The walk back finds results, too, and what pairs of positions around each
// step have in common (`overlaps`), as S is `states`.
template <bool BACK, uint FINDS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_PROMISE)]] void linear_scan_walk(
    device const T* reading [[buffer(0)]], device const T* learned [[buffer(1)]], device const T* values [[buffer(2)]],
    device const T* others [[buffer(3)]], device const int* ends [[buffer(4)]],
    device const float* scores [[buffer(5)]], device const float* factors [[buffer(6)]],
    device const float* state [[buffer(7)]], device const float* skip [[buffer(8)]], device float* added [[buffer(9)]],
    device float* decays [[buffer(10)]], device T* out [[buffer(11)]], device float* final_state [[buffer(12)]],
    device float* dots [[buffer(13)]], device float* kept [[buffer(14)]], device const float* states [[buffer(15)]],
    device float* overlaps [[buffer(16)]], constant DeltaRuleParams& params [[buffer(17)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  using State = ScanState<T>;
  using Rounded = typename State::Rounded;
  constexpr bool kWrites = FINDS == kResults || BACK && FINDS == kDerivative, kDerives = FINDS == kDerivative;
  constexpr uint kPitch = State::kPitch, kAcross = kScanStep / 8, kNarrow = kScanValues + 16 / sizeof(T);
  constexpr uint kScorePitch = kScanStep + 16 / sizeof(Rounded), kTerms = 4 / sizeof(Rounded);
  constexpr bool kBoth =
      sizeof(T) == 2 && FINDS != kAdded;  // whether tiles of `reading` and `learned` lie beside each other
  alignas(16) threadgroup T rows[(kBoth ? 2 : 1) * kScanStep * kPitch];
  alignas(16) threadgroup T tile[kScanStep * kNarrow];
  alignas(16) threadgroup Rounded weighted[kWrites ? kScanStep * kScorePitch : 1];
  threadgroup float sums[kSimdgroups][kScanStep];
  threadgroup float of_reads[kScanStep], of_values[kScanStep];
  threadgroup T* const learned_rows = rows + (kBoth ? kScanStep * kPitch : 0);
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, own = simdgroup * 16;
  const Place place = place_of(lane);
  const uint blocks = (params.values + kScanValues - 1) / kScanValues;
  const uint block = group % blocks, head = group / blocks % params.value_heads;
  const uint number = group / blocks / params.value_heads % params.segments;
  const uint sequence = group / blocks / params.value_heads / params.segments;
  const Segment segment(span_of(ends, params, sequence), params, number);
  const uint last = BACK ? 0 : params.segments - 1;  // no segment needs what the last one adds
  if (FINDS == kAdded && number == last) return;
  const uint key_head = head / (params.value_heads / params.heads), first = block * kScanValues;
  constant int64_t* const reading_strides = BACK ? params.k : params.q;
  constant int64_t* const learned_strides = BACK ? params.q : params.k;
  constant int64_t* const value_strides = BACK ? params.grad : params.v;
  constant int64_t* const other_strides = BACK ? params.v : params.grad;
  const uint batch = segment.span.batch;
  reading += batch * reading_strides[0] + key_head * reading_strides[2];
  learned += batch * learned_strides[0] + key_head * learned_strides[2];
  values += batch * value_strides[0] + head * value_strides[2];
  if (kDerives) others += batch * other_strides[0] + head * other_strides[2];
  const uint heads = params.value_heads * blocks;
  const uint own_block = head * blocks + block;
  constexpr uint kSize = kScanValues * kScanKeys;

  State matrix;
  matrix.reset();
  const ulong own_state = (ulong(sequence) * params.value_heads + head) * params.keys * params.values;
  if (FINDS != kAdded) {
    KeysLoaded load_keys = {state + own_state, params.keys, params.values};
    if (BACK ? params.has_state_grad : params.has_state) matrix.for_pairs(first + own, lane, load_keys);
    // The segments that come before this one.
    const uint before = BACK ? params.segments - 1 - number : number;
    for (uint i = 0; i < before; ++i) {
      const ulong other = ulong(sequence) * params.segments + (BACK ? params.segments - 1 - i : i);
      PairsAdded add_pairs = {added + (other * heads + own_block) * kSize, decays[other * params.value_heads + head]};
      matrix.for_pairs(own, lane, add_pairs);
    }
  }
  float total = 1.0f;  // the decay of all steps
  const uint steps = (segment.end - segment.begin + kScanStep - 1) / kScanStep;
  for (uint n = 0; n < steps; ++n) {
    const uint begin = segment.begin + (BACK ? steps - 1 - n : n) * kScanStep;
    const uint count = min(kScanStep, segment.end - begin), in_chunk = (begin - segment.span.begin) % kChunk;
    const ulong chunk = segment.chunk(begin);
    const ScanFactors own_factors(factors, chunk * params.value_heads + head);
    const float decay = own_factors.since(in_chunk + kScanStep - 1, in_chunk);
    const ulong at = (ulong(batch) * params.length + begin) * params.value_heads + head;
    if (kDerives) {
      const ulong own_chunk = chunk * params.value_heads + head;
      const ulong step = own_chunk * (kChunk / kScanStep) + in_chunk / kScanStep;
      PairsKept keep_pairs = {kept + ((BACK ? own_chunk : step) * blocks + block) * kSize};
      if (!BACK || n == 0 || in_chunk + kScanStep == kChunk) matrix.for_pairs(own, lane, keep_pairs);
      if (BACK) {
        PairsMultiplied multiply_pairs = {states + (step * blocks + block) * kSize, 0.0f};
        matrix.for_pairs(own, lane, multiply_pairs);
        const float overlap = simd_sum(multiply_pairs.sum) * decay;
        if (lane == 0) overlaps[(step * blocks + block) * kSimdgroups + simdgroup] = overlap;
      }
    }
    // Loads of a step do not wait for each other.
    device const T* const own_values = values + begin * value_strides[1];
    device const T* const own_reading = reading + begin * reading_strides[1];
    device const T* const own_learned = learned + begin * learned_strides[1];
    StepRows<kScanValues, kNarrow, T> value_rows;
    StepRows<kScanKeys, kPitch, T> key_rows, next_rows;
    value_rows.load(own_values, value_strides[1], count, first, params.values, params.wide, thread_index);
    if (FINDS != kAdded)
      key_rows.load(own_reading, reading_strides[1], count, 0, params.keys, params.wide, thread_index);
    else
      key_rows.load(own_learned, learned_strides[1], count, 0, params.keys, params.wide, thread_index);
    const uint earlier = thread_index / 4, begin_later = thread_index % 4 * 8;
    float4 own_scores[2], highs[2], lows[2];
    if (kWrites) {
      device const float* const from =
          scores + ((chunk * params.heads + key_head) * kChunk + in_chunk + earlier) * kChunk + in_chunk + begin_later;
      device const float* const gates = own_factors.at + in_chunk + begin_later;
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        own_scores[i] = *reinterpret_cast<device const float4*>(from + 4 * i);
        highs[i] = *reinterpret_cast<device const float4*>(gates + 4 * i);
        lows[i] = *reinterpret_cast<device const float4*>(gates + kChunk + 4 * i);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value_rows.store(tile, own_values, value_strides[1], count, first, params.values, params.wide, thread_index);
    if (FINDS != kAdded)
      key_rows.store(rows, own_reading, reading_strides[1], count, 0, params.keys, params.wide, thread_index);
    else
      key_rows.store(rows, own_learned, learned_strides[1], count, 0, params.keys, params.wide, thread_index);
    if (thread_index < kScanStep) {
      const uint i = in_chunk + thread_index;
      const float since = own_factors.since(i, in_chunk) * params.scale;
      const float until = own_factors.between(in_chunk + kScanStep - 1, i) * own_factors.weight(i);
      of_reads[thread_index] = BACK ? until : since;
      of_values[thread_index] = BACK ? since : until;
    }
    if (kWrites) {
      // Rows of earlier positions.
      const uint i = in_chunk + earlier;
      const float weight = own_factors.weight(i), high = own_factors.at[i], low = own_factors.at[kChunk + i];
#pragma unroll
      for (uint n = 0; n < 8; ++n) {
        const float decay = exp((highs[n / 4][n % 4] - high) + (lows[n / 4][n % 4] - low));
        weighted[earlier * kScorePitch + begin_later + n] =
            static_cast<Rounded>(earlier <= begin_later + n ? own_scores[n / 4][n % 4] * decay * weight : 0.0f);
      }
    }
    if (kBoth) next_rows.load(own_learned, learned_strides[1], count, 0, params.keys, params.wide, thread_index);
    Fragments<T, 2, kAcross> of_others;
    if (kDerives) {
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
        const uint row = first + own + m * 8 + place.row;
#pragma unroll
        for (uint k = 0; k < kAcross; ++k) {
          const uint position = k * 8 + place.column, rest = row < params.values ? rest_of(position, count) : 0;
          device const T* const other = others + (begin + position) * other_strides[1] + row;
          elements(of_others.at[m][k]) =
              vec<T, 2>(rest > 0 ? other[0] : T(0.0f), rest > 1 ? other[other_strides[1]] : T(0.0f));
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragments<T, 2, kAcross> columns;
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint k = 0; k < kAcross; ++k)
        simdgroup_load(columns.at[m][k], tile + k * 8 * kNarrow + own + m * 8, kNarrow, ulong2(0), true);
    }
    if constexpr (FINDS != kAdded) {
      Fragments<float, 2, kAcross> results;
      matrix.template read<kDerives>(results, rows);
#pragma unroll
      for (uint k = 0; k < kAcross; ++k) {
        const float2 factor = float2(of_reads[k * 8 + place.column], of_reads[k * 8 + place.column + 1]);
        float2 product = float2(0.0f);
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
          if (kDerives) product += elements(results.at[m][k]) * static_cast<float2>(elements(of_others.at[m][k]));
          elements(results.at[m][k]) *= factor;
        }
        if (kDerives) {
          product = sum_of_rows(product);
          if (place.row == 0) {
            sums[simdgroup][k * 8 + place.column] = product.x;
            sums[simdgroup][k * 8 + place.column + 1] = product.y;
          }
        }
      }
      if constexpr (kWrites) {
#pragma unroll
        for (uint k = 0; k < kAcross; k += kTerms) {
          RightFragments<Rounded, kTerms, kAcross> terms;
          if (BACK)
            load_transposed<kScorePitch>(terms, weighted + k * 8);
          else
            load<kScorePitch>(terms, weighted + k * 8 * kScorePitch);
          multiply(results, columns, k, terms);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
          const uint row = own + m * 8 + place.row;
          const float skipped =
              params.has_skip && first + row < params.values ? skip[head * params.values + first + row] : 0.0f;
#pragma unroll
          for (uint k = 0; k < kAcross; ++k) {
            const float2 pair = elements(results.at[m][k]) + skipped * static_cast<float2>(elements(columns.at[m][k]));
            threadgroup T* const to = tile + (k * 8 + place.column) * kNarrow + row;
            to[0] = static_cast<T>(pair.x);
            to[kNarrow] = static_cast<T>(pair.y);
          }
        }
      }
    }
    if (kBoth)
      next_rows.store(learned_rows, own_learned, learned_strides[1], count, 0, params.keys, params.wide, thread_index);
    if (FINDS != kAdded) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (kWrites)
      store_rows<kScanValues, kNarrow>(out + at * params.values, long(params.value_heads) * params.values, tile, count,
                                       first, params.values, params.wide, thread_index);
    if (kDerives && thread_index < count) {
      float sum = 0.0f;
#pragma unroll
      for (uint s = 0; s < kSimdgroups; ++s) sum += sums[s][thread_index];
      const ulong of_block = ulong(block) * params.batch * params.length * params.value_heads;
      const uint i = in_chunk + thread_index;  // the weight is left out, whose own gradient this is a part of
      dots[of_block + at + ulong(thread_index) * params.value_heads] =
          sum * (BACK ? own_factors.between(in_chunk + kScanStep - 1, i) : of_reads[thread_index]);
    }
    if (FINDS != kAdded && !kBoth) {
      fetch_rows<kScanKeys, kPitch, kScanKeys, kScanStep>(learned_rows, own_learned, learned_strides[1], count, 0,
                                                          params.keys, params.wide, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    matrix.scale(decay);
    total *= decay;
    matrix.learn(columns, of_values, learned_rows, lane);
  }
  if (FINDS == kAdded) {
    const ulong other = ulong(sequence) * params.segments + number;
    PairsKept keep_pairs = {added + (other * heads + own_block) * kSize};
    matrix.for_pairs(own, lane, keep_pairs);
    if (thread_index == 0 && block == 0) decays[other * params.value_heads + head] = total;
    return;
  }
  KeysStored store_keys = {final_state + own_state, params.keys, params.values};
  const bool wanted = BACK ? params.has_state : FINDS == kResults;
  if (wanted && number == last) matrix.for_pairs(first + own, lane, store_keys);
}

#define INSTANTIATE_SCAN(types, T)                                                           \
  INSTANTIATE("linear_scan_prepare", types, linear_scan_prepare<T>)                          \
  INSTANTIATE("linear_scan_walk_added", types, linear_scan_walk<false, kAdded, T>)           \
  INSTANTIATE("linear_scan_walk_results", types, linear_scan_walk<false, kResults, T>)       \
  INSTANTIATE("linear_scan_walk_derivative", types, linear_scan_walk<false, kDerivative, T>) \
  INSTANTIATE("linear_scan_walk_back_added", types, linear_scan_walk<true, kAdded, T>)       \
  INSTANTIATE("linear_scan_walk_back_derivative", types, linear_scan_walk<true, kDerivative, T>)
INSTANTIATE_SCAN("_float", float)
INSTANTIATE_SCAN("_half", half)
INSTANTIATE_SCAN("_bfloat", bfloat)

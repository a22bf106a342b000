// The gradients of linear_scan.h's q, k, gates and weights, after its walks. With m(j, i) = v(j) do(i), decays d(j, i)
// from j to i, d(i) from before the chunk, d(j, ·) to its end, S before it and D behind it, and i and j in it:
//
//   dq(i) = scale (d(i) S(i)ᵀ do(i) + sum over j <= i of w(j) d(j, i) m(j, i) k(j))
//   dk(j) = w(j) (d(j, ·) Dᵀ v(j) + scale sum over i >= j of d(j, i) m(j, i) q(i))
//
// The second terms' sums over heads of v come first. A pair j < i of positions adds what i reads of j to the gradients
// of the gates between them. The walks have found this for pairs that are not of one step. Sums are sums of what
// counts, and not differences of larger ones, so that nothing is lost where gates are strong.
#include "sequence/linear_scan.h"

constexpr constant uint kSincePitch = kScanStep + 8;
static_assert(kScanStep == 32, "a simdgroup has the positions of a step");

// The sums of the second terms (`pairs`, in rows of j) over a share of the heads, and the gradients of gates and
// weights.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_PROMISE)]] void linear_scan_pairs(
    device const T* grad [[buffer(0)]], device const T* v [[buffer(1)]], device const int* ends [[buffer(2)]],
    device const float* scores [[buffer(3)]], device const float* factors [[buffer(4)]],
    device const float* reads [[buffer(5)]], device const float* carries [[buffer(6)]],
    device const float* overlaps [[buffer(7)]], device float* pairs [[buffer(8)]], device float* gg [[buffer(9)]],
    device float* gweights [[buffer(10)]], constant DeltaRuleParams& params [[buffer(11)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kWidth = 128 / sizeof(T), kPitch = kWidth + 16 / sizeof(T), kTerms = 4 / sizeof(T);
  alignas(16) threadgroup T earlier_rows[kChunk * kPitch];
  alignas(16) threadgroup T later_rows[kChunk * kPitch];
  alignas(16) threadgroup bfloat since[kScanStep * kSincePitch];  // 1 where a row lies at or behind the column
  threadgroup float high[kChunk], low[kChunk], weights[kChunk], read[kChunk], carried[kChunk], written[kChunk];
  threadgroup float across[kSimdgroups][kScanStep];  // sums over pairs of a step around each position
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, own = simdgroup * kOwn;
  const Place place = place_of(lane);
  const uint key_head = group / params.shares % params.heads, chunk = group / params.shares / params.heads;
  const Span span = chunk_of(ends, params, chunk);
  const uint count = span.end - span.begin;
  if (count == 0) return;
  const uint repeats = params.value_heads / params.heads, share = group % params.shares;
  const uint blocks = (params.values + kScanValues - 1) / kScanValues;
  const uint size = (repeats + params.shares - 1) / params.shares;
  const uint first_head = key_head * repeats + share * size;
  const uint end_head = min(first_head + size, (key_head + 1) * repeats);
  const ulong positions = ulong(params.batch) * params.length * params.value_heads;
  grad += span.batch * params.grad[0] + span.begin * params.grad[1];
  v += span.batch * params.v[0] + span.begin * params.v[1];
  scores += (ulong(chunk) * params.heads + key_head) * kChunk * kChunk;
  for (uint i = thread_index; i < kScanStep * kScanStep; i += DELTA_THREADS)
    since[i / kScanStep * kSincePitch + i % kScanStep] = bfloat(i / kScanStep >= i % kScanStep ? 1.0f : 0.0f);
  Fragments<float, 2, 8> all;
  clear(all);
  for (uint head = first_head; head < end_head; ++head) {
    const ulong at = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
    const ulong own_steps = (ulong(chunk) * params.value_heads + head) * (kChunk / kScanStep);
    const ScanFactors own_factors(factors, ulong(chunk) * params.value_heads + head);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < kChunk) {
      high[thread_index] = own_factors.at[thread_index];
      low[thread_index] = own_factors.at[kChunk + thread_index];
      weights[thread_index] = own_factors.weight(thread_index);
      float sum_read = 0.0f, sum_carried = 0.0f;
      for (uint block = 0; block < (thread_index < count ? blocks : 0); ++block) {
        const ulong from = block * positions + at + ulong(thread_index) * params.value_heads;
        sum_read += reads[from];
        sum_carried += carries[from];
      }
      read[thread_index] = sum_read;
      carried[thread_index] = sum_carried;
    }
    Fragments<float, 2, 8> sums;
    clear(sums);
    for (uint first = 0; first < params.values; first += kWidth) {
      if (first > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      fetch_rows<kWidth, kPitch>(earlier_rows, v + head * params.v[2], params.v[1], count, first, params.values,
                                 params.wide, thread_index);
      fetch_rows<kWidth, kPitch>(later_rows, grad + head * params.grad[2], params.grad[1], count, first, params.values,
                                 params.wide, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
      for (uint term = 0; term < kWidth; term += kTerms * 8) {
        Fragments<T, 2, kTerms> rows;
        RightFragments<T, kTerms, 8> columns;
        load<kPitch>(rows, earlier_rows + own * kPitch + term);
        load_transposed<kPitch>(columns, later_rows + term);
        multiply(sums, rows, 0, columns);
      }
    }
    const uint step = own / kScanStep * kScanStep;
    Fragments<float, 2, kScanStep / 8> of_step;
    float of_rows[2] = {0.0f, 0.0f};
#pragma unroll
    for (uint n = 0; n < 8; ++n) {
      const uint later = n * 8 + place.column;
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
        const uint earlier = own + m * 8 + place.row;
        const float weight = weights[earlier];
        float2 product = elements(sums.at[m][n]);
        product.x = earlier <= later ? product.x * decay_of(high, low, later, earlier) : 0.0f;
        product.y = earlier <= later + 1 ? product.y * decay_of(high, low, later + 1, earlier) : 0.0f;
        elements(all.at[m][n]) += product * (weight * params.scale);
        if (n * 8 / kScanStep != step / kScanStep) continue;
        const float2 score = *reinterpret_cast<device const float2*>(scores + earlier * kChunk + later);
        product.x = earlier <= later ? product.x * score.x : 0.0f;  // others may be NaN
        product.y = earlier <= later + 1 ? product.y * score.y : 0.0f;
        of_rows[m] += product.x + product.y;
        elements(of_step.at[m][n % (kScanStep / 8)]) =
            weight * float2(earlier == later ? 0.0f : product.x, earlier == later + 1 ? 0.0f : product.y);
      }
    }
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      of_rows[m] += simd_shuffle_xor(of_rows[m], 1);  // over the lanes of the row
      of_rows[m] += simd_shuffle_xor(of_rows[m], 8);
      if (place.column == 0) written[own + m * 8 + place.row] = of_rows[m];
    }
    Fragments<float, 2, kScanStep / 8> around;  // in rows of j, the sums over i >= t
    clear(around);
#pragma unroll
    for (uint k = 0; k < kScanStep / 8; k += 2) {
      RightFragments<bfloat, 2, kScanStep / 8> columns;
      load<kSincePitch>(columns, since + k * 8 * kSincePitch);
      metalcore_multiply_mixed(around.at, of_step.at, k, columns.at, 0);
    }
#pragma unroll
    for (uint n = 0; n < kScanStep / 8; ++n) {
      const uint column = n * 8 + place.column;
      float2 sum = float2(0.0f);
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
        const uint earlier = own - step + m * 8 + place.row;
        const float2 pair = elements(around.at[m][n]);
        sum += float2(earlier < column ? pair.x : 0.0f, earlier < column + 1 ? pair.y : 0.0f);
      }
      sum = sum_of_rows(sum);
      if (place.row == 0) {
        across[simdgroup][column] = sum.x;
        across[simdgroup][column + 1] = sum.y;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index >= kChunk) continue;
    // A simdgroup has the positions of a step.
    float begun = weights[thread_index] * carried[thread_index], ended = read[thread_index];
#pragma unroll
    for (ushort distance = 1; distance < kScanStep; distance *= 2) {
      const float before = simd_shuffle_up(begun, distance), after = simd_shuffle_down(ended, distance);
      if (lane >= distance) begun += before;
      if (lane + distance < kScanStep) ended += after;
    }
    begun = simd_shuffle_up(begun, 1);
    if (thread_index >= count) continue;
    const ulong to = at + ulong(thread_index) * params.value_heads;
    if (params.weighted) gweights[to] = carried[thread_index] + written[thread_index];
    if (!params.has_gate) continue;
    const ulong first_overlap = (own_steps + simdgroup) * blocks * kSimdgroups;
    float sum = across[2 * simdgroup][lane] + across[2 * simdgroup + 1][lane];
    for (uint i = 0; i < blocks * kSimdgroups; ++i) sum += overlaps[first_overlap + i];
    gg[to] = sum + ended + (lane > 0 ? begun : 0.0f);
  }
  device float* const own_pairs = pairs + ulong(group) * kChunk * kChunk;
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
#pragma unroll
    for (uint n = 0; n < 8; ++n)
      *reinterpret_cast<device float2*>(own_pairs + (own + m * 8 + place.row) * kChunk + n * 8 + place.column) =
          elements(all.at[m][n]);
  }
}

// dq, or with OF_KEYS dk, of 64 keys of a chunk. Where threadgroups share the heads of v, each leaves float32 of its
// own heads (`parts`) instead.
template <bool OF_KEYS, uint PROMISE, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(PROMISE)]] void linear_scan_keys(
    device const T* values [[buffer(0)]], device const T* others [[buffer(1)]], device const int* ends [[buffer(2)]],
    device const float* factors [[buffer(3)]], device const float* states [[buffer(4)]],
    device const float* pairs [[buffer(5)]], device T* out [[buffer(6)]], device float* parts [[buffer(7)]],
    constant DeltaRuleParams& params [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  using Rounded = typename Multiplied<T>::type;
  constexpr uint kWidth = 64, kPart = 128 / sizeof(Rounded), kPitch = kPart + 16 / sizeof(T),
                 kRight = kWidth + 16 / sizeof(Rounded);
  constexpr uint kTile = kWidth + 16 / sizeof(T), kTerms = 4 / sizeof(Rounded), kLeft = 4 / sizeof(T);
  alignas(16) threadgroup T rows[kChunk * kPitch];
  alignas(16) threadgroup Rounded matrix[kPart * kRight];
  threadgroup float row_factors[kChunk];
  const uint lane = thread_index % 32, own = thread_index / 32 * kOwn;
  const Place place = place_of(lane);
  const uint slices = (params.keys + kWidth - 1) / kWidth;
  const uint first_key = group % slices * kWidth, share = group / slices % params.shares;
  const uint own_pairs = group / slices, key_head = own_pairs / params.shares % params.heads;
  const uint chunk = own_pairs / params.shares / params.heads;
  const Span span = chunk_of(ends, params, chunk);
  const uint count = span.end - span.begin;
  if (count == 0) return;
  const uint repeats = params.value_heads / params.heads;
  const uint blocks = (params.values + kScanValues - 1) / kScanValues;
  constant int64_t* const strides = OF_KEYS ? params.v : params.grad;
  constant int64_t* const other_strides = OF_KEYS ? params.q : params.k;
  values += span.batch * strides[0] + span.begin * strides[1];
  others += span.batch * other_strides[0] + span.begin * other_strides[1] + key_head * other_strides[2];
  Fragments<float, 2, kWidth / 8> sums;
  clear(sums);
  const uint size = (repeats + params.shares - 1) / params.shares;
  const uint first_head = key_head * repeats + share * size;
  const uint end_head = min(first_head + size, (key_head + 1) * repeats);
  for (uint head = first_head; head < end_head; ++head) {
    const ScanFactors own_factors(factors, ulong(chunk) * params.value_heads + head);
    for (uint first = 0; first < params.values; first += kPart) {
      const ulong place_of_state = (ulong(chunk) * params.value_heads + head) * (OF_KEYS ? 1 : kChunk / kScanStep);
      device const float* const state =
          states + (place_of_state * blocks * kScanValues + first) * kScanKeys + first_key;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fetch_rows<kPart, kPitch>(rows, values + head * strides[2], strides[1], count, first, params.values, params.wide,
                                thread_index);
      fetch_slice<kWidth, kRight, kPart>(matrix, state, kScanKeys, kPart, 0, kWidth, true, One(), thread_index);
      if (first == 0 && thread_index < kChunk)
        row_factors[thread_index] =
            OF_KEYS ? own_factors.between(kChunk - 1, thread_index) * own_factors.weight(thread_index)
                    : own_factors.since(thread_index, 0) * params.scale;
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint k = 0; k < kPart / 8; k += kTerms) {
        Fragments<T, 2, kTerms> narrow;
        Fragments<Rounded, 2, kTerms> left;
        load<kPitch>(narrow, rows + own * kPitch + k * 8);
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
          const float factor = row_factors[own + m * 8 + place.row];
#pragma unroll
          for (uint i = 0; i < kTerms; ++i)
            elements(left.at[m][i]) =
                static_cast<vec<Rounded, 2>>(static_cast<float2>(elements(narrow.at[m][i])) * factor);
        }
        RightFragments<Rounded, kTerms, kWidth / 8> terms;
        load<kRight>(terms, matrix + k * 8 * kRight);
        multiply(sums, left, 0, terms);
      }
    }
  }
  // The positions of the chunk, for all of these heads at once.
  pairs += ulong(own_pairs) * kChunk * kChunk;
  threadgroup T* const tile = rows;
  static_assert(kPart * kTile <= kChunk * kPitch, "the tile of keys has the place of the tile of values");
  for (uint begin = 0; begin < kChunk; begin += kPart) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_rows<kWidth, kTile, kWidth, kPart>(tile, others + begin * other_strides[1], other_strides[1],
                                             max(count, begin) - begin, first_key, params.keys, params.wide,
                                             thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint k = 0; k < kPart / 8; k += kLeft) {
      Fragments<float, 2, kLeft> left;
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
        const uint row = own + m * 8 + place.row;
#pragma unroll
        for (uint i = 0; i < kLeft; ++i) {
          const uint column = begin + (k + i) * 8 + place.column;
          device const float* const from = pairs + (OF_KEYS ? row * kChunk + column : column * kChunk + row);
          elements(left.at[m][i]) = float2(from[0], from[OF_KEYS ? 1 : kChunk]);
        }
      }
      RightFragments<T, kLeft, kWidth / 8> terms;
      load<kTile>(terms, tile + k * 8 * kTile);
      metalcore_multiply_mixed(sums.at, left.at, 0, terms.at, 0);
    }
  }
  const ulong pitch = ulong(params.heads) * params.keys;
  const ulong to = (ulong(span.batch) * params.length + span.begin) * pitch + key_head * params.keys;
  out += to;
  parts += ulong(share) * params.batch * params.length * pitch + to;
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint row = own + m * 8 + place.row;
#pragma unroll
    for (uint n = 0; n < kWidth / 8; ++n) {
      const uint column = first_key + n * 8 + place.column, rest = row < count ? rest_of(column, params.keys) : 0;
      if (params.shares > 1)
        put_pair(parts + row * pitch + column, elements(sums.at[m][n]), rest);
      else
        put_pair(out + row * pitch + column, elements(sums.at[m][n]), rest);
    }
  }
}

#define INSTANTIATE_GRADIENTS(types, promise, T)                                 \
  INSTANTIATE("linear_scan_pairs", types, linear_scan_pairs<T>)                  \
  INSTANTIATE("linear_scan_queries", types, linear_scan_keys<false, promise, T>) \
  INSTANTIATE("linear_scan_keys", types, linear_scan_keys<true, promise, T>)
INSTANTIATE_GRADIENTS("_float", DELTA_PROMISE, float)
INSTANTIATE_GRADIENTS("_half", DELTA_PROMISE, half)
INSTANTIATE_GRADIENTS("_bfloat", DELTA_BFLOAT_PROMISE, bfloat)

// The gradient of skip: the sums over positions of v times the gradients of o. A threadgroup has kScanValues values of
// a head, and one of `shares` parts of the positions, whose sums it leaves (`parts`).
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void linear_scan_skip(
    device const T* grad [[buffer(0)]], device const T* v [[buffer(1)]], device float* parts [[buffer(2)]],
    constant DeltaRuleParams& params [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kVector = 16 / sizeof(T), kAcross = kScanValues / kVector, kRows = DELTA_THREADS / kAcross;
  threadgroup float sums[kRows][kScanValues];
  const uint blocks = (params.values + kScanValues - 1) / kScanValues;
  const uint block = group % blocks, head = group / blocks % params.value_heads;
  const uint part = group / blocks / params.value_heads;
  const uint column = thread_index % kAcross * kVector, row = thread_index / kAcross;
  const uint first = block * kScanValues + column, rest = rest_of(first, params.values);
  const uint size = (params.length + params.shares - 1) / params.shares;
  const uint end = min((part + 1) * size, params.length);
  grad += head * params.grad[2] + first;
  v += head * params.v[2] + first;
  float own[kVector];
#pragma unroll
  for (uint n = 0; n < kVector; ++n) own[n] = 0.0f;
  for (uint batch = 0; batch < (rest > 0 ? params.batch : 0); ++batch) {
    device const T* const of_grad = grad + batch * params.grad[0];
    device const T* const of_v = v + batch * params.v[0];
    if (params.wide) {
#pragma unroll 4
      for (uint i = part * size + row; i < end; i += kRows) {
        const uint4 left = *reinterpret_cast<device const uint4*>(of_grad + i * params.grad[1]);
        const uint4 right = *reinterpret_cast<device const uint4*>(of_v + i * params.v[1]);
        thread const T* const lefts = reinterpret_cast<thread const T*>(&left);
        thread const T* const rights = reinterpret_cast<thread const T*>(&right);
#pragma unroll
        for (uint n = 0; n < kVector; ++n) own[n] += static_cast<float>(lefts[n]) * static_cast<float>(rights[n]);
      }
    } else {
      for (uint i = part * size + row; i < end; i += kRows) {
#pragma unroll
        for (uint n = 0; n < kVector; ++n)
          if (n < rest)
            own[n] +=
                static_cast<float>(of_grad[i * params.grad[1] + n]) * static_cast<float>(of_v[i * params.v[1] + n]);
      }
    }
  }
#pragma unroll
  for (uint n = 0; n < kVector; ++n) sums[row][column + n] = own[n];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint value = block * kScanValues + thread_index;
  if (thread_index >= kScanValues || value >= params.values) return;
  float sum = 0.0f;
#pragma unroll
  for (uint i = 0; i < kRows; ++i) sum += sums[i][thread_index];
  parts[(ulong(part) * params.value_heads + head) * params.values + value] = sum;
}
INSTANTIATE("linear_scan_skip", "_float", linear_scan_skip<float>)
INSTANTIATE("linear_scan_skip", "_half", linear_scan_skip<half>)
INSTANTIATE("linear_scan_skip", "_bfloat", linear_scan_skip<bfloat>)

// The sums over the parts.
[[kernel]] void linear_scan_skip_sums(device const float* parts [[buffer(0)]], device float* out [[buffer(1)]],
                                      constant DeltaRuleParams& params [[buffer(2)]],
                                      uint i [[thread_position_in_grid]]) {
  const uint size = params.value_heads * params.values;
  if (i >= size) return;
  float sum = 0.0f;
  for (uint part = 0; part < params.shares; ++part) sum += parts[ulong(part) * size + i];
  out[i] = sum;
}

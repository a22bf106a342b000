// Linear attention with a gate for each head, whose state S of values by keys adds v kᵀ times a weight:
//
//   S(i) = exp(g(i)) S(i - 1) + w(i) v(i) k(i)ᵀ;   o(i) = scale S(i) q(i)
//
// Threadgroups walk along parts of sequences, segments, with kScanValues rows of S, in steps of kScanStep positions,
// whose own part of the results is a product of matrices. The walk back along time is the same with q and k, and
// v and the gradients of o, in each other's place. A simdgroup has 16 rows of S in registers. Source: Dao, Gu,
// "Transformers are SSMs", 2024.
#pragma once

#include "sequence/delta_tiles.h"

constexpr constant uint kScanStep = DELTA_SCAN_STEP, kScanKeys = DELTA_SCAN_KEYS, kScanValues = DELTA_SCAN_VALUES;

// What kernels round floats to before they multiply them by rows of T, where the results are rounded to T anyway.
// Halves would not hold all numbers.
template <typename T>
struct Multiplied {
  using type = float;
};
template <>
struct Multiplied<bfloat> {
  using type = bfloat;
};

// What chunks have of each head in device memory: the sums of the gates from the chunk's beginning on, in two parts,
// and the weights.
struct ScanFactors {
  device const float* at;

  ScanFactors(device const float* factors, ulong chunk) : at(factors + chunk * 3 * kChunk) {}

  float total(uint i) const { return at[i] + at[kChunk + i]; }
  float weight(uint i) const { return at[2 * kChunk + i]; }
  // From before the position `begin` of the chunk.
  float since(uint i, uint begin) const { return begin == 0 ? exp(total(i)) : between(i, begin - 1); }
  float between(uint later, uint earlier) const {
    return exp((at[later] - at[earlier]) + (at[kChunk + later] - at[kChunk + earlier]));
  }
};

// A segment's positions in a sequence. All segments except the last one have as many chunks.
struct Segment {
  Span span;
  uint begin, end;

  Segment(Span span, constant DeltaRuleParams& params, uint segment) : span(span) {
    const uint chunks = (span.end - span.begin + kChunk - 1) / kChunk;
    const uint size = (chunks + params.segments - 1) / params.segments * kChunk;
    begin = min(span.begin + segment * size, span.end);
    end = min(begin + size, span.end);
  }
  ulong chunk(uint position) const { return span.place + (position - span.begin) / kChunk; }
};

// The sums over the rows of fragments, which all lanes of a column get.
inline float2 sum_of_rows(float2 pair) {
  pair += float2(simd_shuffle_xor(pair.x, 2), simd_shuffle_xor(pair.y, 2));
  pair += float2(simd_shuffle_xor(pair.x, 4), simd_shuffle_xor(pair.y, 4));
  return pair + float2(simd_shuffle_xor(pair.x, 16), simd_shuffle_xor(pair.y, 16));
}

// A thread's vectors of a step's rows on their way from device memory to a tile. Rows that are not `wide` come at once.
template <uint WIDTH, uint kPitch, typename T>
struct StepRows {
  static constexpr constant uint kVector = 16 / sizeof(T), kAcross = WIDTH / kVector;
  static constexpr constant uint kApart = DELTA_THREADS / kAcross, kCount = kScanStep / kApart;

  uint4 words[kCount];

  void load(device const T* x, long stride, uint count, uint first, uint size, bool wide, uint thread_index) {
    const uint column = first + thread_index % kAcross * kVector, begin = thread_index / kAcross;
    x += begin * stride + column;
#pragma unroll
    for (uint i = 0; i < kCount; ++i) {
      words[i] = uint4(0);
      if (wide && column < size && begin + i * kApart < count) words[i] = *reinterpret_cast<device const uint4*>(x);
      x += kApart * stride;
    }
  }
  void store(threadgroup T* tile, device const T* x, long stride, uint count, uint first, uint size, bool wide,
             uint thread_index) const {
    if (!wide) {
      fetch_rows<WIDTH, kPitch, WIDTH, kScanStep>(tile, x, stride, count, first, size, false, thread_index);
      return;
    }
    tile += thread_index / kAcross * kPitch + thread_index % kAcross * kVector;
#pragma unroll
    for (uint i = 0; i < kCount; ++i) *reinterpret_cast<threadgroup uint4*>(tile + i * kApart * kPitch) = words[i];
  }
};

// Writes the columns of a tile that lie before `size`, for the positions of a step.
template <uint WIDTH, uint kPitch, typename T>
inline void store_rows(device T* to, long stride, threadgroup const T* tile, uint count, uint first, uint size,
                       bool wide, uint thread_index) {
  constexpr uint kVector = 16 / sizeof(T);
  const uint vector = wide ? kVector : 1, step = DELTA_THREADS * vector / WIDTH;
  const uint column = thread_index % (WIDTH / vector) * vector;
  if (first + column >= size) return;
  for (uint row = thread_index / (WIDTH / vector); row < count; row += step) {
    device T* const own = to + row * stride + first + column;
    threadgroup const T* const from = tile + row * kPitch + column;
    if (wide)
      *reinterpret_cast<device uint4*>(own) = *reinterpret_cast<threadgroup const uint4*>(from);
    else
      *own = *from;
  }
}

// What becomes of pairs of neighbouring elements of a state, in memory of a row for each value (Pairs…) or each key.
struct PairsAdded {
  device const float* from;
  float factor;  // of what the state has

  void operator()(thread float2& pair, ulong row, ulong key) const {
    pair = pair * factor + *reinterpret_cast<device const float2*>(from + row * kScanKeys + key);
  }
};
struct PairsKept {
  device float* to;

  void operator()(thread float2& pair, ulong row, ulong key) const {
    *reinterpret_cast<device float2*>(to + row * kScanKeys + key) = pair;
  }
};
struct PairsMultiplied {
  device const float* by;
  float sum;

  void operator()(thread float2& pair, ulong row, ulong key) {
    sum += dot(pair, *reinterpret_cast<device const float2*>(by + row * kScanKeys + key));
  }
};
struct KeysLoaded {
  device const float* from;
  uint keys, values;

  void operator()(thread float2& pair, ulong row, ulong key) const {
    device const float* const own = from + key * values + row;
    if (row < values && key < keys) pair.x = own[0];
    if (row < values && key + 1 < keys) pair.y = own[values];
  }
};
struct KeysStored {
  device float* to;
  uint keys, values;

  void operator()(thread float2& pair, ulong row, ulong key) const {
    device float* const own = to + key * values + row;
    if (row < values && key < keys) own[0] = pair.x;
    if (row < values && key + 1 < keys) own[values] = pair.y;
  }
};

// 16 rows of a state for each simdgroup.
template <typename T>
struct ScanState {
  using Rounded = typename Multiplied<T>::type;
  static constexpr constant uint kTerms = 4 / sizeof(T);  // fragments of a product's operands
  static constexpr constant uint kPitch = kScanKeys + 16 / sizeof(T);

  Fragments<float, 2, 4> at[kScanKeys / 32];

  void reset() {
#pragma unroll
    for (uint slice = 0; slice < kScanKeys / 32; ++slice) clear(at[slice]);
  }
  void scale(float factor) {
#pragma unroll
    for (uint slice = 0; slice < kScanKeys / 32; ++slice) {
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
#pragma unroll
        for (uint n = 0; n < 4; ++n) elements(at[slice].at[m][n]) *= factor;
      }
    }
  }
  // Calls f(elements, row, key) for all pairs of neighbouring elements of a row.
  template <typename F>
  void for_pairs(uint first, uint lane, thread F& f) {
    const Place place = place_of(lane);
    const ulong row = first + place.row, key = place.column;  // as wide as addresses, which then differ by constants
#pragma unroll
    for (uint slice = 0; slice < kScanKeys / 32; ++slice) {
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
#pragma unroll
        for (uint n = 0; n < 4; ++n) f(elements(at[slice].at[m][n]), row + m * 8, key + (slice * 32 + n * 8));
      }
    }
  }

  // sums = the products with the rows of a tile: a row for each value, a column for each position.
  template <bool EXACT>
  void read(thread Fragments<float, 2, kScanStep / 8>& sums, threadgroup const T* tile) {
    clear(sums);
#pragma unroll
    for (uint slice = 0; slice < kScanKeys / 32; ++slice) {
#pragma unroll
      for (uint k = 0; k < 4; k += kTerms) {
        RightFragments<T, kTerms, kScanStep / 8> terms;
        load_transposed<kPitch>(terms, tile + slice * 32 + k * 8);
        if constexpr (EXACT || sizeof(Rounded) == 4) {
          metalcore_multiply_mixed<sizeof(T) == 2>(sums.at, at[slice].at, k, terms.at, 0);
        } else {
          Fragments<Rounded, 2, kTerms> rows;
#pragma unroll
          for (uint m = 0; m < 2; ++m) {
#pragma unroll
            for (uint i = 0; i < kTerms; ++i)
              elements(rows.at[m][i]) = static_cast<vec<Rounded, 2>>(elements(at[slice].at[m][k + i]));
          }
          multiply(sums, rows, 0, terms);
        }
      }
    }
  }
  // Adds the products of values, a column for each position, times factors of the positions, and the rows of a tile.
  void learn(thread Fragments<T, 2, kScanStep / 8>& values, threadgroup const float* factors, threadgroup const T* tile,
             uint lane) {
#pragma unroll
    for (uint k = 0; k < kScanStep / 8; k += kTerms) {
      Fragments<float, 2, kTerms> rows;
#pragma unroll
      for (uint i = 0; i < kTerms; ++i) {
        threadgroup const float* const own = factors + (k + i) * 8 + place_of(lane).column;
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
          elements(rows.at[m][i]) = static_cast<float2>(elements(values.at[m][k + i])) * float2(own[0], own[1]);
        }
      }
#pragma unroll
      for (uint slice = 0; slice < kScanKeys / 32; ++slice) {
        RightFragments<T, kTerms, 4> terms;
        load<kPitch>(terms, tile + k * 8 * kPitch + slice * 32);
        metalcore_multiply_mixed(at[slice].at, rows.at, 0, terms.at, 0);
      }
    }
  }
};

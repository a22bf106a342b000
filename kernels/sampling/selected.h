// Finds the k-th largest number of a row, or the one at which the largest have a part of the row's mass, without a
// sort.
#pragma once

#include "common/rows.h"

constexpr constant uint kDigits = 16;

// The lowest digit's place: a 16-bit number has fewer bits as float32.
template <typename T>
constexpr constant int kLastShift = 0;
template <>
constexpr constant int kLastShift<half> = 12;
template <>
constexpr constant int kLastShift<bfloat> = 16;

// Bits that have the order of the numbers.
inline uint ordered_bits(float value) {
  const uint bits = as_type<uint>(value);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

inline float number_of(uint ordered) { return as_type<float>(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu)); }

// The elements of a row that a thread loads before it looks at the first of them, from `first` on with `step` between
// them. Those behind `end` are the last one before it.
constexpr constant uint kAhead = 4;
template <typename Number, uint N, typename Row>
inline void load_ahead(thread Number (&values)[N], Row row, uint first, uint step, uint end) {
#pragma unroll
  for (uint j = 0; j < N; ++j) values[j] = row.at(min(first + j * step, end - 1));
}

// The ordered bits of the largest number that, with all larger ones, has a count of `target`, or `target` of the mass.
// They are exact down to the lowest digit of T. Row has a length, at(i), ordered(value), mass(value) and `least`:
// numbers with lower ordered bits do not take part. `team` has scratch memory for 2 * kDigits numbers.
template <bool masses, typename T, typename Row>
inline uint selected(Row row, float target, Threadgroup team) {
  constexpr uint kLoads = masses ? kAhead / 2 : kAhead;  // masses take more registers
  uint found = 0;
  float above = 0.0f;
  for (int shift = 28; shift >= kLastShift<T>; shift -= 4) {
    float sums[kDigits];
#pragma unroll
    for (uint d = 0; d < kDigits; ++d) sums[d] = 0.0f;
    for (uint first = team.thread_index; first < row.length; first += kLoads * team.threads) {
      decltype(row.at(0)) values[kLoads];
      load_ahead(values, row, first, team.threads, row.length);
#pragma unroll
      for (uint j = 0; j < kLoads; ++j) {
        const auto value = values[j];
        const uint bits = row.ordered(value);
        if (first + j * team.threads >= row.length || bits < row.least) continue;
        if (shift < 28 && bits >> (shift + 4) != found >> (shift + 4)) continue;
        const uint digit = bits >> shift & (kDigits - 1);
        const float weight = masses ? row.mass(value) : 1.0f;
#pragma unroll
        for (uint d = 0; d < kDigits; ++d) sums[d] += d == digit ? weight : 0.0f;
      }
    }
    team.sum(sums, shift / 4 % 2);
    if (masses && shift == 28) {
      float total = 0.0f;
#pragma unroll
      for (uint d = 0; d < kDigits; ++d) total += sums[d];
      target *= total;
    }
    uint digit = 0, lowest = 0;  // the lowest digit that occurs, in case that roundings leave too little
    bool done = false;
#pragma unroll
    for (int d = kDigits - 1; d >= 0; --d) {
      if (done || sums[d] == 0.0f) continue;
      lowest = d;
      if (above + sums[d] >= target) {
        digit = d;
        done = true;
      } else {
        above += sums[d];
      }
    }
    found |= (done ? digit : lowest) << shift;
    if (!done) target = INFINITY;
  }
  return found;
}

// How a class is drawn from logits: which of them have a mass, and where the sum of the masses reaches a random part of
// the whole, in the order of the threads.
#pragma once

#include "sampling/candidates.h"

// The elements that a thread loads before it looks at the first of them, where it does little with each.
constexpr constant uint kWalkAhead = 8;

// NaN has no probability, and -0 is 0.
template <typename T>
struct Row {
  device const T* x;

  static constexpr constant bool sorted = false;

  static float number(float value) { return isnan(value) ? -INFINITY : value + 0.0f; }
  float at(uint i) const { return number(static_cast<float>(x[i])); }
};

// The largest come first.
struct Keys {
  threadgroup const uint* keys;
  static constexpr constant bool sorted = true;

  float at(uint i) const { return number_of(keys[i]); }
};

template <typename Source>
struct Logits {
  Source source;
  uint length;
  float scale;
  float maximum;
  uint least;   // ordered bits of the smallest logit that is kept
  float floor;  // the smallest logit that is kept

  static float number(float value) { return Source::number(value); }
  float at(uint i) const { return source.at(i); }
  static uint ordered(float value) { return ordered_bits(value); }
  bool keeps(float value) const { return ordered(value) >= least && value >= floor; }
  // The largest logits, also where they are infinite, have 1.
  float mass(float value) const { return value == maximum ? 1.0f : exp((value - maximum) * scale); }
};

// The largest of all logits. `team` has scratch memory for 32 numbers.
template <typename Source>
inline float largest_of(Logits<Source> logits, Threadgroup team) {
  float maximum = -INFINITY;
  for (uint first = team.thread_index; first < logits.length; first += kWalkAhead * team.threads) {
    float values[kWalkAhead];
    load_ahead(values, logits, first, team.threads, logits.length);
#pragma unroll
    for (uint j = 0; j < kWalkAhead; ++j) maximum = max(maximum, values[j]);
  }
  return team.maximum(maximum, 0);
}

// The smallest number of all threads.
inline uint smallest(uint value, threadgroup uint* scratch, Threadgroup team) {
  value = simd_min(value);
  if (team.lane == 0) scratch[team.simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_min(team.lane < team.threads / 32 ? scratch[team.lane] : ~0u);
}

// The place of the first of the largest logits.
template <typename Source>
inline uint first_of_largest(Logits<Source> logits, threadgroup uint* scratch, Threadgroup team) {
  uint first = ~0u;
  for (uint i = team.thread_index; i < logits.length && first == ~0u; i += team.threads)
    if (logits.at(i) == logits.maximum) first = i;
  return smallest(first, scratch, team);
}

// The elements of a thread: of sorted ones a run, so that the threads' order is theirs.
struct Own {
  uint first, end, step;

  Own(uint length, bool sorted, Threadgroup team) {
    const uint run = (length + team.threads - 1) / team.threads;
    first = sorted ? min(team.thread_index * run, length) : team.thread_index;
    end = sorted ? min(first + run, length) : length;
    step = sorted ? 1 : team.threads;
  }
};

// The threads' numbers before this one's, those up to it, and all. Each end is the next thread's begin, so that one
// thread has what lies between the ends.
struct Sums {
  float begin, end, all;

  Sums(float own, threadgroup float* totals, Threadgroup team) {
    const float within = simd_prefix_inclusive_sum(own), previous = simd_shuffle_up(within, 1);
    if (team.lane == 31) totals[team.simdgroup] = within;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float before = 0.0f;  // of the simdgroups before this one
    all = 0.0f;
    for (uint s = 0; s < team.threads / 32; ++s) {
      before = s == team.simdgroup ? all : before;
      all += totals[s];
    }
    begin = team.lane > 0 ? before + previous : before;
    end = before + within;
  }
};

// The mass of the thread's logits that are kept.
template <uint loads, typename Source>
inline float own_mass(Logits<Source> logits, Own part) {
  float own = 0.0f;
  for (uint first = part.first; first < part.end; first += loads * part.step) {
    float values[loads];
    load_ahead(values, logits, first, part.step, part.end);
#pragma unroll
    for (uint j = 0; j < loads; ++j)
      own += first + j * part.step < part.end && logits.keeps(values[j]) ? logits.mass(values[j]) : 0.0f;
  }
  return own;
}

// The key of the last of those sorted logits that are needed for a mass of top_p.
inline uint last_of(Logits<Keys> logits, Own part, float top_p, threadgroup float* totals, threadgroup uint* last,
                    Threadgroup team) {
  float own = 0.0f;
  for (uint i = part.first; i < part.end; i += part.step)
    own += logits.source.keys[i] >= logits.least ? logits.mass(logits.at(i)) : 0.0f;
  const Sums sums(own, totals, team);
  const float target = top_p * sums.all;
  if (sums.begin < target && target <= sums.end) {
    float sum = sums.begin;
    uint i = part.first;
    for (; i + 1 < part.end; ++i) {
      sum += logits.mass(logits.at(i));
      if (sum >= target) break;
    }
    *last = logits.source.keys[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return *last;
}

// Where the thread has the point: the place of the class. Else ~0. `totals` has room for 32 numbers and another.
template <typename T, typename Source>
inline uint drawn(Logits<Source> logits, SampleOptions options, float top_p, float uniform, threadgroup float* totals,
                  Threadgroup team) {
  const Own part(logits.length, Source::sorted, team);
  if (top_p < 1.0f) {
    uint last;
    if constexpr (Source::sorted)
      last = last_of(logits, part, top_p, totals, reinterpret_cast<threadgroup uint*>(totals + 32), team);
    else
      last = selected<true, T>(logits, top_p, team);
    logits.least = max(logits.least, last);
  }
  if (options.min_p > 0.0f) logits.floor = logits.maximum + options.temperature * log(options.min_p);
  // The largest one stays, whatever roundings do.
  logits.floor = min(logits.floor, logits.maximum);

  const Sums sums(own_mass<Source::sorted ? 1 : kWalkAhead>(logits, part), totals, team);
  float point = uniform * sums.all;
  point = point < sums.all ? point : 0.0f;
  const bool has_point = sums.begin <= point && point < sums.end;
  const uint owner = simd_min(has_point ? team.lane : 32u);
  if (owner == 32u) return ~0u;
  // The owner's simdgroup looks at 32 of its elements at a time.
  const uint end = simd_broadcast(part.end, owner);
  float sum = simd_broadcast(sums.begin, owner);
  uint chosen = 0;
  for (uint first = simd_broadcast(part.first, owner); first < end && sum <= point; first += 32 * part.step) {
    const uint i = first + team.lane * part.step;
    const float value = logits.at(min(i, end - 1));
    const float mass = i < end && logits.keeps(value) ? logits.mass(value) : 0.0f;
    const float through = sum + simd_prefix_inclusive_sum(mass), previous = simd_shuffle_up(through, 1);
    const float before = team.lane > 0 ? previous : sum;
    chosen = max(chosen, simd_max(mass > 0.0f && before <= point ? i : 0u));
    sum = simd_broadcast(through, 31);
  }
  return has_point ? chosen : ~0u;
}

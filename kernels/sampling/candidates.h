// The few numbers of a row that may be among its k largest, collected in a walk along it and in a second one along
// little of it.
//
// Each thread has four groups of the row's elements, of which each has a largest one. The k-th largest of these is at
// most the row's k-th largest number: so what lies below it is not among the k largest. Of random numbers little more
// than k is left, and lies in the parts of few threads. Where more is left than memory has room for (many equal
// numbers, say), the caller walks along the row instead.
#pragma once

#include "sampling/sampling.h"
#include "sampling/selected.h"

constexpr constant uint kCandidates = 2048;  // that memory has room for
constexpr constant uint kGroups = 4;         // of a thread
constexpr constant uint kAtOnce = 4;         // loads of 16 bytes on their way
constexpr constant uint kLeastLength = 16;   // of a row
constexpr constant uint kCounts = 64;        // of simdgroups, for two steps
constexpr constant uint kScratch = kCounts + 1024;

// Larger numbers come first, and then lower indices.
struct Entry {
  uint key, index;
};
inline bool comes_before(Entry a, Entry b) { return a.key > b.key || (a.key == b.key && a.index < b.index); }

inline uint power_of_two(uint k) {
  uint count = 1;
  while (count < k) count *= 2;
  return count;
}

// Whether the entry at `place` changes places with the one `apart` from it, in a bitonic sort's step of runs of `size`.
inline bool changes(Entry own, Entry other, uint place, uint size, uint apart) {
  const bool first = ((place & apart) == 0) == ((place & size) == 0);  // which of the two it shall be
  return first ? comes_before(other, own) : comes_before(own, other);
}

// The steps of a bitonic sort from `apart` 32 down, where each simdgroup has runs of 64 entries in registers: of runs
// of `size` entries, or of all up to 64.
template <typename Memory>
inline void sort_runs(Memory keys, Memory places, uint count, uint size, Threadgroup team) {
  for (uint first = team.simdgroup * 64; first < count; first += 2 * team.threads) {
    const uint low = first + team.lane, high = low + 32;
    Entry a = {keys[low], places[low]}, b = {keys[high], places[high]};
    for (uint run = size > 64 ? size : 2; run <= size; run *= 2) {
      if (run >= 64 && changes(a, b, low, run, 32)) {
        const Entry kept = a;
        a = b, b = kept;
      }
      for (uint apart = min(run, 32u) / 2; apart > 0; apart /= 2) {
        // Lanes `apart` from each other; of runs of 64 and more, both entries of a lane.
        const Entry c = {simd_shuffle_xor(a.key, apart), simd_shuffle_xor(a.index, apart)};
        const Entry d = {simd_shuffle_xor(b.key, apart), simd_shuffle_xor(b.index, apart)};
        if (changes(a, c, low, run, apart)) a = c;
        if (changes(b, d, high, run, apart)) b = d;
      }
    }
    keys[low] = a.key, places[low] = a.index;
    keys[high] = b.key, places[high] = b.index;
  }
}

inline void barrier_for(threadgroup uint*) { threadgroup_barrier(mem_flags::mem_threadgroup); }
inline void barrier_for(device uint*) { threadgroup_barrier(mem_flags::mem_device); }

// Sorts `count` entries, a power of two from 64 on: a bitonic sort.
template <typename Memory>
inline void sort_entries(Memory keys, Memory places, uint count, Threadgroup team) {
  sort_runs<Memory>(keys, places, count, 64, team);
  barrier_for(keys);
  for (uint size = 128; size <= count; size *= 2) {
    for (uint apart = size / 2; apart > 32; apart /= 2) {
      for (uint i = team.thread_index; i < count / 2; i += team.threads) {
        const uint low = i / apart * 2 * apart + i % apart, high = low + apart;
        const Entry a = {keys[low], places[low]}, b = {keys[high], places[high]};
        if (changes(a, b, low, size, apart)) {
          keys[low] = b.key, places[low] = b.index;
          keys[high] = a.key, places[high] = a.index;
        }
      }
      barrier_for(keys);
    }
    sort_runs<Memory>(keys, places, count, size, team);
    barrier_for(keys);
  }
}

// The k-th largest key of all threads' groups, or a lower one which few more than k reach. `scratch` has room for
// kCounts numbers, and two bits are found at a time.
inline uint least_of(thread const uint (&keys)[kGroups], uint k, threadgroup uint* scratch, Threadgroup team) {
  uint found = 0, reached = kGroups * team.threads;
  for (uint shift = 30, step = 0; reached > k + 16 + k / 16; shift -= 2, ++step) {
    // How many keys reach the three next larger ones: of a simdgroup at most 128, and in all at most 4096.
    uint counts = 0;
#pragma unroll
    for (uint g = 0; g < kGroups; ++g) {
      const uint above = keys[g] >= found ? min((keys[g] - found) >> shift, 3u) : 0;
      counts += (above > 0) + (uint(above > 1) << 10) + (uint(above > 2) << 20);
    }
    counts = simd_sum(counts);
    threadgroup uint* const all = scratch + step % 2 * 32;
    if (team.lane == 0) all[team.simdgroup] = counts;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    counts = team.lane < team.threads / 32 ? all[team.lane] : 0;
    const uint low = simd_sum((counts & 0x3ffu) | (counts >> 10 & 0x3ffu) << 16), high = simd_sum(counts >> 20);
    const uint reach[3] = {low & 0xffffu, low >> 16, high};
#pragma unroll
    for (uint above = 0; above < 3; ++above) {
      if (reach[above] < k) break;
      reached = reach[above];
      found += 1u << shift;
    }
    if (shift == 0) break;
  }
  return found;
}

// The elements of a vector of 16 bytes.
template <typename T>
inline void spread(Pack<T> pack, thread float (&values)[kPackElements<T>]) {
  float4 fours[kPackVectors<T>];
  unpack(pack, fours);
#pragma unroll
  for (uint e = 0; e < kPackElements<T>; ++e) values[e] = fours[e / 4][e % 4];
}

// Adds a number to those that are left, of which few threads have one at a time.
inline void keep(uint key, uint place, threadgroup uint* keys, threadgroup uint* places,
                 threadgroup atomic_uint* counter) {
  const uint to = atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
  if (to < kCandidates) keys[to] = key, places[to] = place;
}

// Returns how many numbers are left, in the order of `comes_before` with their places; more than kCandidates if they
// have no room. Both `keys` and `places` have room for kCandidates numbers, and lie side by side; `counters` has two
// numbers. The row's elements `x` begin `past` elements
// behind a multiple of 16 bytes.
template <typename T, typename Row>
inline uint candidates(Row row, device const T* x, uint past, uint k, threadgroup uint* keys, threadgroup uint* places,
                       threadgroup atomic_uint* counters, Threadgroup team) {
  constexpr uint kEach = kPackElements<T>;
  if (row.length < kLeastLength || k > kGroups * team.threads) return kCandidates + 1;
  const Edges<false, T> edges(past, row.length, team.thread_index);
  device const Pack<T>* const packs = reinterpret_cast<device const Pack<T>*>(x + edges.head);
  const uint count = edges.body / kEach;
  const uint edge = edges.present ? row.ordered(row.number(x[edges.element])) : 0;
  uint largest[kGroups] = {edge, 0, 0, 0};
  for (uint first = team.thread_index; first < count; first += kAtOnce * team.threads) {
    Pack<T> loaded[kAtOnce];
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j) loaded[j] = packs[min(first + j * team.threads, count - 1)];
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j) {
      float values[kEach];
      spread<T>(loaded[j], values);
#pragma unroll
      for (uint e = 0; e < kEach; ++e) {
        const uint key = row.ordered(row.number(values[e]));
        largest[e % kGroups] = max(largest[e % kGroups], first + j * team.threads < count ? key : 0);
      }
    }
  }
  if (team.thread_index < 2) atomic_store_explicit(counters + team.thread_index, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint least = least_of(largest, k, reinterpret_cast<threadgroup uint*>(team.scratch), team);

  // The threads with a group that reaches it, behind the numbers that least_of reads.
  threadgroup uint* const reaching = reinterpret_cast<threadgroup uint*>(team.scratch) + kCounts;
  const bool reaches = max(max(largest[0], largest[1]), max(largest[2], largest[3])) >= least;
  if (simd_any(reaches)) {
    const uint ahead = simd_prefix_exclusive_sum(uint(reaches)), sum = simd_sum(uint(reaches));
    uint begin = 0;
    if (team.lane == 0) begin = atomic_fetch_add_explicit(counters, sum, memory_order_relaxed);
    begin = simd_broadcast_first(begin);
    if (reaches) reaching[begin + ahead] = team.thread_index;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint threads = atomic_load_explicit(counters, memory_order_relaxed);
  const uint loads = threads * ((count + team.threads - 1) / team.threads);
  if (edges.present && edge >= least) keep(edge, edges.element, keys, places, counters + 1);
  for (uint first = team.thread_index; first < loads; first += kAtOnce * team.threads) {
    Pack<T> loaded[kAtOnce];
    uint at[kAtOnce];
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j) {
      const uint load = first + j * team.threads;
      at[j] = load < loads ? load / threads * team.threads + reaching[load % threads] : count;
      loaded[j] = packs[min(at[j], count - 1)];
    }
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j) {
      if (at[j] >= count) continue;
      float values[kEach];
      spread<T>(loaded[j], values);
#pragma unroll
      for (uint e = 0; e < kEach; ++e) {
        const uint key = row.ordered(row.number(values[e]));
        if (key >= least) keep(key, edges.head + at[j] * kEach + e, keys, places, counters + 1);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint all = atomic_load_explicit(counters + 1, memory_order_relaxed);
  if (all > kCandidates) return all;
  const uint room = max(64u, power_of_two(all));
  for (uint i = all + team.thread_index; i < room; i += team.threads) keys[i] = 0, places[i] = ~0u;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sort_entries<threadgroup uint*>(keys, places, room, team);
  return all;
}

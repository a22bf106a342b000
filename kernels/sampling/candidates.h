// The few numbers of a row that may be among its k largest, collected in two walks along it.
//
// The threads' elements are dealt out to groups, of which each has a largest one. The k-th largest of these is at most
// the row's k-th largest number: so what lies below it is not among the k largest, and of random numbers little more
// than k is left. Where more is left than memory has room for (many equal numbers, say), the caller walks along the row
// instead.
#pragma once

#include "sampling/sampling.h"
#include "sampling/selected.h"

constexpr constant uint kCandidates = 2048;  // that memory has room for
constexpr constant uint kGroups = 4;         // of a thread
constexpr constant uint kAtOnce = 8;         // loads on their way

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

// Sorts `count` entries, a power of two: a bitonic sort.
template <bool in_device_memory, typename Memory>
inline void sort_entries(Memory keys, Memory places, uint count, Threadgroup team) {
  for (uint size = 2; size <= count; size *= 2) {
    for (uint apart = size / 2; apart > 0; apart /= 2) {
      for (uint i = team.thread_index; i < count / 2; i += team.threads) {
        const uint low = i / apart * 2 * apart + i % apart, high = low + apart;
        const Entry a = {keys[low], places[low]}, b = {keys[high], places[high]};
        if (low & size ? comes_before(a, b) : comes_before(b, a)) {
          keys[low] = b.key, places[low] = b.index;
          keys[high] = a.key, places[high] = a.index;
        }
      }
      if constexpr (in_device_memory)
        threadgroup_barrier(mem_flags::mem_device);
      else
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// The largest keys of all groups, as `selected` reads rows.
struct Largest {
  threadgroup const uint* keys;
  uint length;
  uint least;

  uint at(uint i) const { return keys[i]; }
  static uint ordered(uint key) { return key; }
  static float mass(uint) { return 1.0f; }
};

// Returns how many numbers are left, in the order of `comes_before` with their places; more than kCandidates if they
// have no room. Both `keys` and `places` have room for kCandidates numbers, and lie side by side.
template <typename T, typename Row>
inline uint candidates(Row row, uint k, threadgroup uint* keys, threadgroup uint* places,
                       threadgroup atomic_uint* counter, Threadgroup team) {
  uint largest[kGroups];
#pragma unroll
  for (uint g = 0; g < kGroups; ++g) largest[g] = 0;
  for (uint first = team.thread_index; first < row.length; first += kAtOnce * team.threads) {
    uint own[kAtOnce];
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j) own[j] = row.ordered(row.at(min(first + j * team.threads, row.length - 1)));
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j)
      largest[j % kGroups] = max(largest[j % kGroups], first + j * team.threads < row.length ? own[j] : 0);
  }
#pragma unroll
  for (uint g = 0; g < kGroups; ++g) keys[g * team.threads + team.thread_index] = largest[g];
  if (team.thread_index == 0) atomic_store_explicit(counter, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint groups = kGroups * team.threads;
  const Largest all = {keys, groups, 0};
  const uint least = k <= groups ? selected<false, T>(all, static_cast<float>(k), team) : 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint first = 0; first < row.length; first += kAtOnce * team.threads) {
    uint own[kAtOnce], found = 0;
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j)
      own[j] = row.ordered(row.at(min(first + j * team.threads + team.thread_index, row.length - 1)));
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j)
      found += first + j * team.threads + team.thread_index < row.length && own[j] >= least;
    if (!simd_any(found > 0)) continue;
    uint to = simd_prefix_exclusive_sum(found), begin = 0;
    const uint sum = simd_sum(found);
    if (team.lane == 0) begin = atomic_fetch_add_explicit(counter, sum, memory_order_relaxed);
    to += simd_broadcast_first(begin);
#pragma unroll
    for (uint j = 0; j < kAtOnce; ++j) {
      const uint i = first + j * team.threads + team.thread_index;
      if (i >= row.length || own[j] < least) continue;
      if (to < kCandidates) keys[to] = own[j], places[to] = i;
      ++to;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint count = atomic_load_explicit(counter, memory_order_relaxed);
  if (count > kCandidates) return count;
  const uint room = power_of_two(count);
  for (uint i = count + team.thread_index; i < room; i += team.threads) keys[i] = 0, places[i] = ~0u;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sort_entries<false, threadgroup uint*>(keys, places, room, team);
  return count;
}

// The matrix of a merge is D + rho z zᵀ in the basis of its parts' eigenvectors. Deflation (Dongarra and Sorensen 1987)
// finds what needs no secular equation: entries with a tiny z, and neighbours so close that a rotation may make the z
// of one of them zero.
#include <metal_stdlib>
using namespace metal;

#include "tridiagonal_merge.h"

constant constexpr uint kThreads = TRIDIAGONAL_DEFLATE_THREADS, kSimdgroups = kThreads / 32;

// The sum of the values of the threads before this one, and of all.
struct Scan {
  uint before, total;
};
inline Scan scan(uint value, threadgroup uint* sums, uint thread_index) {
  const uint ahead = simd_prefix_exclusive_sum(value), sum = simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index % 32 == 0) sums[thread_index / 32] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Scan result = {ahead, 0};
  for (uint i = 0; i < kSimdgroups; ++i) {
    if (i < thread_index / 32) result.before += sums[i];
    result.total += sums[i];
  }
  return result;
}

// How many of the ascending values are less than `value`, or with OR_EQUAL, not more.
template <bool OR_EQUAL>
inline uint count_below(device const float* values, uint count, float value) {
  uint first = 0;
  while (count > 0) {
    const uint half_count = count / 2;
    const float other = values[first + half_count];
    const bool is_below = OR_EQUAL ? other <= value : other < value;
    first += is_below ? half_count + 1 : 0;
    count = is_below ? count - half_count - 1 : half_count;
  }
  return first;
}

// Whether the rotation that makes the first z zero leaves an entry off the diagonal that is small enough.
inline bool is_close(float difference, float z, float next_z, float tolerance) {
  return abs(difference * z * next_z) <= tolerance * fma(z, z, next_z * next_z);
}

// Neighbours that are close are a chain: each rotation moves z from an entry to the next, and only the last one, whose
// z is the norm of all, stays. One thread walks along the chains, in the order of entries.
inline void deflate_chains(device float* d, device const float* z, device float* merged, device uint* stays,
                           device float2* factors, threadgroup const uint* close, uint count, float tolerance) {
  uint next = 0;
  for (uint word = 0; 32 * word + 1 < count; ++word) {
    for (uint bits = close[word]; bits != 0; bits &= bits - 1) {
      uint i = 32 * word + ctz(bits);
      if (i < next) continue;
      float value = d[i], norm = abs(z[i]);
      for (; i + 1 < count; ++i) {
        const float next_value = d[i + 1], next_z = z[i + 1];
        if (!is_close(next_value - value, norm, next_z, tolerance)) break;
        const float longer = precise::sqrt(fma(norm, norm, next_z * next_z));
        const float cosine = next_z / longer, sine = norm / longer;
        d[i] = fma(next_value - value, sine * sine, value);
        stays[i] = 0;
        factors[i] = float2(cosine / norm, -sine);
        value = fma(next_value - value, cosine * cosine, value);
        norm = longer;
      }
      d[i] = value;
      merged[i] = norm;
      next = i + 1;
    }
  }
}

[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_DEFLATE_THREADS)]] void tridiagonal_deflate(
    device const float* values [[buffer(0)]], device const float* eigenvectors [[buffer(1)]],
    device const float* beside [[buffer(2)]], device float* sorted [[buffer(3)]], device uint* sources [[buffer(4)]],
    device float2* factors [[buffer(5)]], device float* poles [[buffer(6)]], device float* weights [[buffer(7)]],
    device uint4* rows [[buffer(8)]], device uint4* deflated [[buffer(9)]],
    device TridiagonalMerge* merges [[buffer(10)]], constant TridiagonalMergeParams& p [[buffer(11)]],
    uint merge [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint sums[kSimdgroups];
  threadgroup float largest[kSimdgroups];
  threadgroup uint close[TRIDIAGONAL_MOST / 32];
  const uint m = p.size, h = p.part;
  const ulong at = ulong(merge) * m, all = ulong(p.merges) * m;
  values += at;
  eigenvectors += at * h;
  // Entries whose z is not tiny come first, in ascending order of d, and then all others.
  device float* const sorted_d = sorted + at;  // all entries in order
  device float* const sorted_z = sorted + all + at;
  device float* const d = sorted + 2 * all + at;  // entries in their final places
  device float* const z = sorted + 3 * all + at;
  device float* const merged = sorted + 4 * all + at;  // z after rotations
  device uint* const sorted_source = sources + at;
  device uint* const source = sources + all + at;  // the row, of all of both parts
  device uint* const stays = sources + 2 * all + at;
  factors += at, poles += at, weights += at, rows += at, deflated += at;

  const float coupling = beside[at + h - 1], rho = 2.0f * abs(coupling);
  float most = 0.0f;
  for (uint i = thread_index; i < m; i += kThreads) {
    const float value = values[i];
    const bool in_first = i < h;
    const float entry =
        in_first ? eigenvectors[ulong(h - 1) * h + i] : copysign(1.0f, coupling) * eigenvectors[ulong(h) * h + (i - h)];
    const uint place =
        in_first ? i + count_below<false>(values + h, h, value) : i - h + count_below<true>(values, h, value);
    sorted_d[place] = value;
    sorted_z[place] = entry * M_SQRT1_2_F;
    sorted_source[place] = i;
    most = max(most, max(value < 0.5f * TRIDIAGONAL_PADDING ? abs(value) : 0.0f, abs(entry * M_SQRT1_2_F)));
  }
  most = simd_max(most);
  if (thread_index % 32 == 0) largest[thread_index / 32] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  for (uint i = 0; i < kSimdgroups; ++i) most = max(most, largest[i]);
  const float tolerance = 4.0f * FLT_EPSILON * most;

  const uint share = (m + kThreads - 1) / kThreads;
  const uint first = min(thread_index * share, m), end = min(first + share, m);
  uint found = 0;
  for (uint i = first; i < end; ++i) found += rho * abs(sorted_z[i]) > tolerance ? 1 : 0;
  const Scan candidates = scan(found, sums, thread_index);
  const uint count = candidates.total;
  uint place = candidates.before, tiny_place = count + first - candidates.before;
  for (uint i = first; i < end; ++i) {
    const float value = sorted_d[i], entry = sorted_z[i];
    if (rho * abs(entry) > tolerance) {
      d[place] = value;
      z[place] = entry;
      merged[place] = entry;
      source[place] = sorted_source[i];
      stays[place++] = 1;
    } else {
      poles[tiny_place] = value;
      rows[sorted_source[i]] = uint4(0, tiny_place, TRIDIAGONAL_NONE, 0);
      deflated[tiny_place] = uint4(0, as_type<uint>(1.0f), tiny_place, TRIDIAGONAL_NONE);
      ++tiny_place;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);

  for (uint begin = 0; begin < count; begin += kThreads) {
    const uint i = begin + thread_index;
    const bool closes = i + 1 < count && is_close(d[i + 1] - d[i], z[i], z[i + 1], tolerance);
    const uint bits = static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(closes)));
    if (thread_index % 32 == 0) close[i / 32] = bits;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0) deflate_chains(d, z, merged, stays, factors, close, count, tolerance);
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);

  found = 0;
  for (uint i = first; i < min(end, count); ++i) found += stays[i];
  const Scan roots = scan(found, sums, thread_index);
  uint root = roots.before;
  for (uint i = first; i < min(end, count); ++i) {
    rows[source[i]] = uint4(as_type<uint>(z[i]), i, root, 0);
    if (stays[i] != 0) {
      poles[root] = d[i];
      weights[root++] = merged[i];
    } else {
      const uint to = roots.total + i - root;
      poles[to] = d[i];
      deflated[to] = uint4(as_type<uint>(factors[i].x), as_type<uint>(factors[i].y), i + 1, root);
    }
  }
  if (thread_index == 0) merges[merge] = {rho, roots.total};
}

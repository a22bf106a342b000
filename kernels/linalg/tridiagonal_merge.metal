// A merge of divide and conquer. Its matrix is D + rho z zᵀ in the basis of its parts' eigenvectors.
#include <metal_stdlib>
using namespace metal;

#include "tridiagonal.h"

#define TRIDIAGONAL_NONE 0xffffffffu  // no chain
#define TRIDIAGONAL_ROOT 0xfffffffeu  // no deflated entry, and so no chain either

// The first `roots` entries have a pole of the secular equation each, and those behind them are deflated.
struct TridiagonalMerge {
  float rho;
  uint roots;
};

// Rows (of the parts' eigenvectors): the bits of z, the entry's place in the order of chains, and its chain's root or
// TRIDIAGONAL_NONE.
//
// Deflated entries: an eigenvector is a z_r in the rows r of the chain `root` before `place`, and b in the row at
// `place`: the bits of a, those of b, place, root.

// Deflation (Dongarra and Sorensen 1987) finds what needs no secular equation: entries with a tiny z, and neighbours so
// close that a rotation may make the z of one of them zero.
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

// The eigenvalues and eigenvectors of D + rho z zᵀ, for the entries that are not deflated. A simdgroup takes an
// eigenvalue, or an entry of z.
constant constexpr uint kRootSimdgroups = TRIDIAGONAL_THREADS / 32;
constant constexpr uint kMostSteps = 60;  // of an iteration, where 3 to 6 are usual
constant constexpr float kRounding = 0.5f * FLT_EPSILON;

// The sums of z² / (pole - eigenvalue) over the poles from the first to `last` and over those behind it, and their
// derivatives.
struct Secular {
  float below, above, below_slope, above_slope;
};

// The eigenvalue is origin + offset, so that its differences from the poles have no cancellation. The poles `skipped`
// and skipped + 1 do not take part.
inline Secular secular_sums(device const float* poles, device const float* z, uint roots, uint last, uint skipped,
                            float origin, float offset, uint lane) {
  Secular sums = {0.0f, 0.0f, 0.0f, 0.0f};
  for (uint i = lane; i < roots; i += 32) {
    const float ratio = z[i] / ((poles[i] - origin) - offset);
    const float term = i - skipped < 2 ? 0.0f : z[i] * ratio;
    const float slope = i - skipped < 2 ? 0.0f : ratio * ratio;
    if (i <= last)
      sums.below += term, sums.below_slope += slope;
    else
      sums.above += term, sums.above_slope += slope;
  }
  return {simd_sum(sums.below), simd_sum(sums.above), simd_sum(sums.below_slope), simd_sum(sums.above_slope)};
}

// The root of c x² - a x + b = 0 that leads towards the eigenvalue.
inline float quadratic_step(float a, float b, float c) {
  // 4 b c may leave float32's range where its quotient by a² does not.
  const float most = max(abs(a), max(abs(b), abs(c)));
  if (most == 0.0f) return 0.0f;
  a /= most, b /= most, c /= most;
  const float root = precise::sqrt(abs(fma(a, a, -4.0f * b * c)));
  return a <= 0.0f ? (a - root) / (2.0f * c) : 2.0f * b / (a + root);
}

// Finds an eigenvalue between two poles, or above the last one, by rational functions with these poles (Li 1994: the
// middle way) within an interval that holds it. `found` has eigenvalues, and behind them the deflated ones.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_THREADS)]] void tridiagonal_roots(
    device const float* poles [[buffer(0)]], device const float* weights [[buffer(1)]],
    device const TridiagonalMerge* merges [[buffer(2)]], device float2* eigenvalues [[buffer(3)]],
    device float* found [[buffer(4)]], constant TridiagonalMergeParams& p [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const ulong own = ulong(group) * kRootSimdgroups + simdgroup;
  if (own >= ulong(p.merges) * p.size) return;
  const uint merge = uint(own / p.size), j = uint(own % p.size);
  const ulong at = ulong(merge) * p.size;
  const uint roots = merges[merge].roots;
  const float rho = merges[merge].rho;
  poles += at, weights += at;
  if (j >= roots) {
    if (lane == 0) found[own] = poles[j];
    return;
  }
  const bool is_last = j + 1 == roots;
  const float inverse = 1.0f / rho, left = poles[j];
  const float right = is_last ? left : poles[j + 1];
  float origin = left, offset, low = 0.0f, high;
  if (is_last) {
    float norm = 0.0f;
    for (uint i = lane; i < roots; i += 32) norm = fma(weights[i], weights[i], norm);
    high = rho * simd_sum(norm) * (1.0f + 16.0f * FLT_EPSILON);
    offset = 0.5f * high;
  } else {
    const float gap = right - left, middle = 0.5f * gap;
    const Secular others = secular_sums(poles, weights, roots, j, j, left, middle, lane);
    const float c = inverse + others.below + others.above;
    const float first = weights[j] * weights[j], second = weights[j + 1] * weights[j + 1];
    const bool from_left = c + (second - first) / middle >= 0.0f;
    origin = from_left ? left : right;
    low = from_left ? 0.0f : -middle;
    high = from_left ? middle : 0.0f;
    offset = from_left ? quadratic_step(fma(c, gap, first + second), first * gap, c)
                       : quadratic_step(fma(-c, gap, first + second), -second * gap, c);
    if (!(offset > low && offset < high)) offset = 0.5f * (low + high);
  }
  for (uint step = 0; step < kMostSteps; ++step) {
    const Secular sums = secular_sums(poles, weights, roots, j, UINT_MAX - 1, origin, offset, lane);
    const float value = inverse + sums.below + sums.above, slope = sums.below_slope + sums.above_slope;
    const float error = fma(8.0f, sums.above - sums.below, inverse) + abs(offset) * slope;
    if (abs(value) <= kRounding * error) break;
    if (value > 0.0f)
      high = offset;
    else
      low = offset;
    const float to_left = (left - origin) - offset, to_right = (right - origin) - offset;
    float change;
    if (is_last) {
      change = to_left + to_left * to_left * slope / (value - to_left * slope);
    } else {
      const float c = value - to_left * sums.below_slope - to_right * sums.above_slope;
      const float a = fma(to_left + to_right, value, -to_left * to_right * slope);
      change = quadratic_step(a, to_left * to_right * value, c);
    }
    if (!(change * value < 0.0f)) change = -value / slope;
    float next = offset + change;
    if (!(next > low && next < high)) next = 0.5f * (low + high);
    if (next == offset || next == low || next == high) break;
    offset = next;
  }
  if (lane == 0) {
    eigenvalues[own] = float2(origin, offset);
    found[own] = origin + offset;
  }
}

// Computes the z for which the found eigenvalues are exact (Gu and Eisenstat 1994), up to a factor. With it, the
// eigenvectors are orthogonal.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_THREADS)]] void tridiagonal_weights(
    device const float* poles [[buffer(0)]], device const float* weights [[buffer(1)]],
    device const TridiagonalMerge* merges [[buffer(2)]], device const float2* eigenvalues [[buffer(3)]],
    device float* exact_weights [[buffer(4)]], constant TridiagonalMergeParams& p [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const ulong own = ulong(group) * kRootSimdgroups + simdgroup;
  if (own >= ulong(p.merges) * p.size) return;
  const uint merge = uint(own / p.size), i = uint(own % p.size), roots = merges[merge].roots;
  if (i >= roots) return;
  poles += ulong(merge) * p.size, eigenvalues += ulong(merge) * p.size;
  const float pole = poles[i];
  float product = 1.0f;  // all its factors are between zero and one, except for the last one
  for (uint j = lane; j < roots; j += 32) {
    const float difference = (eigenvalues[j].x - pole) + eigenvalues[j].y;
    product *= j + 1 == roots ? difference : difference / (poles[j < i ? j : j + 1] - pole);
  }
  product = simd_product(product);
  if (lane == 0) exact_weights[own] = copysign(precise::sqrt(abs(product)), weights[own]);
}

// Finds each eigenvalue's place among all of the merge, and what makes its eigenvector: the bits of origin, offset and
// the inverse of its norm with TRIDIAGONAL_ROOT, or what `deflated` has.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_THREADS)]] void tridiagonal_columns(
    device const float* poles [[buffer(0)]], device const float* exact_weights [[buffer(1)]],
    device const TridiagonalMerge* merges [[buffer(2)]], device const float2* eigenvalues [[buffer(3)]],
    device const float* found [[buffer(4)]], device const uint4* deflated [[buffer(5)]],
    device float* values [[buffer(6)]], device uint4* columns [[buffer(7)]],
    constant TridiagonalMergeParams& p [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const ulong own = ulong(group) * kRootSimdgroups + simdgroup;
  if (own >= ulong(p.merges) * p.size) return;
  const uint merge = uint(own / p.size), j = uint(own % p.size), roots = merges[merge].roots;
  const ulong at = ulong(merge) * p.size;
  found += at, poles += at, exact_weights += at;
  const float value = found[j];
  uint place = 0;
  for (uint i = lane; i < p.size; i += 32) place += found[i] < value || (found[i] == value && i < j) ? 1 : 0;
  place = simd_sum(place);
  float norm = 0.0f;
  float2 eigenvalue = float2(0.0f);
  if (j < roots) {
    eigenvalue = eigenvalues[own];
    for (uint i = lane; i < roots; i += 32) {
      const float entry = exact_weights[i] / ((poles[i] - eigenvalue.x) - eigenvalue.y);
      norm = fma(entry, entry, norm);
    }
    norm = simd_sum(norm);
  }
  if (lane != 0) return;
  values[at + place] = value;
  columns[at + place] = j < roots ? uint4(as_type<uint>(eigenvalue.x), as_type<uint>(eigenvalue.y),
                                          as_type<uint>(1.0f / precise::sqrt(norm)), TRIDIAGONAL_ROOT)
                                  : deflated[own];
}

// Writes the matrix that the parts' eigenvectors are multiplied by. A threadgroup takes some rows.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_THREADS)]] void tridiagonal_fill(
    device const float* poles [[buffer(0)]], device const float* weights [[buffer(1)]],
    device const float* exact_weights [[buffer(2)]], device const uint4* rows [[buffer(3)]],
    device const uint4* columns [[buffer(4)]], device float* eigenvectors [[buffer(5)]],
    constant TridiagonalMergeParams& p [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 row_numbers[TRIDIAGONAL_FILL_ROWS];  // weight, pole, z
  threadgroup uint2 row_places[TRIDIAGONAL_FILL_ROWS];    // place, root
  const uint m = p.size, first = group.x * TRIDIAGONAL_FILL_ROWS;
  const uint count = min(m - first, uint(TRIDIAGONAL_FILL_ROWS));
  const ulong at = ulong(group.y) * m;
  if (thread_index < count) {
    const uint4 row = rows[at + first + thread_index];
    const float z = as_type<float>(row.x);
    float4 numbers = float4(0.0f, TRIDIAGONAL_PADDING, z, 0.0f);
    if (row.z != TRIDIAGONAL_NONE)
      numbers.xy = float2(z / weights[at + row.z] * exact_weights[at + row.z], poles[at + row.z]);
    row_numbers[thread_index] = numbers;
    row_places[thread_index] = row.yz;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint c = thread_index; c < m; c += TRIDIAGONAL_THREADS) {
    const uint4 column = columns[at + c];
    const float2 numbers = as_type<float2>(column.xy);
    const bool is_root = column.w == TRIDIAGONAL_ROOT;
    const float inverse_norm = as_type<float>(column.z);
    for (uint r = 0; r < count; ++r) {
      const float4 row = row_numbers[r];
      const uint2 place = row_places[r];
      float entry;
      if (is_root)
        entry = row.x * inverse_norm / ((row.y - numbers.x) - numbers.y);
      else
        entry = place.x == column.z ? numbers.y : place.y == column.w && place.x < column.z ? row.z * numbers.x : 0.0f;
      eigenvectors[(at + first + r) * m + c] = entry;
    }
  }
}

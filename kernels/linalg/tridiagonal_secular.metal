// The eigenvalues and eigenvectors of D + rho z zᵀ, for the entries of a merge that are not deflated. A simdgroup takes
// an eigenvalue, or an entry of z.
#include <metal_stdlib>
using namespace metal;

#include "tridiagonal_merge.h"

constant constexpr uint kSimdgroups = TRIDIAGONAL_THREADS / 32;
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
  const ulong own = ulong(group) * kSimdgroups + simdgroup;
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
  const ulong own = ulong(group) * kSimdgroups + simdgroup;
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
  const ulong own = ulong(group) * kSimdgroups + simdgroup;
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

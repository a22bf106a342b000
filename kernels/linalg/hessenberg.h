// Threads that share a general matrix h with rows of `stride` numbers, real or complex; balancing; and the reduction to
// upper Hessenberg form, in which an orthogonal or unitary Z makes all entries below the subdiagonal zero.
//
// Z is column by column: entry (i, j) is z[j * n + i]. A reflector that is applied from the right changes each row of Z
// by itself. One thread has the row, and needs no barrier for it.
#pragma once

#include <metal_stdlib>

#include "eig.h"
#include "scalars.h"

// All decisions of a team are those of numbers that are the same in its threads. No barrier stands in a branch.
template <typename T, uint SIMDGROUPS, bool IN_DEVICE_MEMORY>
struct Team {
  typedef T Number;  // of the matrix: float or float2
  static constexpr constant uint kThreads = 32 * SIMDGROUPS;
  static constexpr constant uint kFloats = SIMDGROUPS == 1 ? 1 : 2 * SIMDGROUPS;

  threadgroup float* memory;  // kFloats, whose halves take turns
  uint index;                 // the thread's
  uint turn;

  void wait() thread const {
    if (SIMDGROUPS == 1)
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    else if (IN_DEVICE_MEMORY)
      wait_for_device_memory();
    else
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  void wait_for_device_memory() thread const {
    if (SIMDGROUPS == 1)
      metal::simdgroup_barrier(metal::mem_flags::mem_device | metal::mem_flags::mem_threadgroup);
    else
      metal::threadgroup_barrier(metal::mem_flags::mem_device | metal::mem_flags::mem_threadgroup);
  }

  threadgroup const float* publish(float value) thread {
    threadgroup float* const half_of_memory = memory + turn * SIMDGROUPS;
    turn ^= 1;
    if (index % 32 == 0) half_of_memory[index / 32] = value;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    return half_of_memory;
  }
  float sum(float value) thread {
    value = metal::simd_sum(value);
    if (SIMDGROUPS == 1) return value;
    threadgroup const float* const published = publish(value);
    float total = published[0];
    for (uint s = 1; s < SIMDGROUPS; ++s) total += published[s];
    return total;
  }
  // The values must not be NaN.
  float max(float value) thread {
    value = metal::simd_max(value);
    if (SIMDGROUPS == 1) return value;
    threadgroup const float* const published = publish(value);
    for (uint s = 0; s < SIMDGROUPS; ++s) value = metal::max(value, published[s]);
    return value;
  }
};

struct InOrder {
  uint operator[](uint i) thread const { return i; }
};

// Copies the rows and columns of a in this order.
template <typename Threads, typename Order, typename Rows>
inline void load_scaled(device const typename Threads::Number* a, constant EigParams& p, Order order, Rows h,
                        uint stride, uint n, float scale, thread const Threads& team) {
  for (uint i = 0; i < n; ++i)
    for (uint j = team.index; j < n; j += Threads::kThreads)
      h[i * stride + j] = scale > 0.0f ? a[order[i] * p.row_stride + order[j] * p.column_stride] * scale
                                       : typename Threads::Number(0.0f);
}

// The largest magnitude, or infinity for a matrix with NaN.
template <typename Threads, typename Rows>
inline float largest_entry(Rows h, uint stride, uint n, thread Threads& team) {
  uint bits = 0;
  for (uint i = 0; i < n; ++i)
    for (uint j = team.index; j < n; j += Threads::kThreads) bits = metal::max(bits, bits_of(h[i * stride + j]));
  return team.max(bits < 0x7f800000 ? as_type<float>(bits) : INFINITY);
}

// Multiplies h by a power of two that makes its largest entry about one, and returns it. It returns 0 if there are NaN
// or infinities, and makes h zero.
template <typename Threads, typename Rows>
inline float scale_matrix(Rows h, uint stride, uint n, thread Threads& team) {
  const float largest = largest_entry(h, stride, n, team);
  const float scale = largest < INFINITY ? scale_to_one(largest) : 0.0f;
  for (uint i = 0; i < n; ++i)
    for (uint j = team.index; j < n; j += Threads::kThreads)
      h[i * stride + j] = scale > 0.0f ? h[i * stride + j] * scale : typename Threads::Number(0.0f);
  team.wait();
  return scale;
}

// The rows and columns from `first` to `end` - 1.
struct Range {
  uint first, end;
};

// One of two searches for eigenvalues that stand alone. A row without entries other than the diagonal's in the columns
// that remain goes to the end of `order`, and then no longer remains; with COLUMNS a column goes to the beginning. The
// entries of `counts` and `remains` are those of each thread's own rows.
template <bool COLUMNS, typename Threads, typename Rows>
inline void isolate(Rows h, uint stride, uint n, threadgroup float* counts, threadgroup float* remains,
                    threadgroup ushort* order, thread Range& range, thread Threads& team) {
  const uint along = COLUMNS ? stride : 1, across = COLUMNS ? 1 : stride;
  for (uint i = team.index; i < n; i += Threads::kThreads) {
    counts[i] = 0.0f;
    for (uint j = 0; j < n; ++j)
      if (j != i && size_of(h[i * across + j * along]) > 0.0f) counts[i] += remains[j];
  }
  float found = 1.0f;
  for (uint step = 0; step < n && found > 0.0f; ++step) {
    found = 0.0f;
    for (uint i = team.index; i < n; i += Threads::kThreads)
      if (remains[i] > 0.0f && counts[i] == 0.0f) found = float(i + 1);
    found = team.max(found);
    if (found == 0.0f) continue;
    const uint gone = uint(found) - 1;
    if (team.index == 0) order[COLUMNS ? range.first : range.end - 1] = ushort(gone);
    range.first += COLUMNS ? 1 : 0;
    range.end -= COLUMNS ? 0 : 1;
    for (uint i = team.index; i < n; i += Threads::kThreads) {
      if (i == gone) remains[i] = 0.0f;
      if (i != gone && size_of(h[i * across + gone * along]) > 0.0f) counts[i] -= 1.0f;
    }
  }
  team.wait();
}

// Finds an order of rows and columns in which h is upper triangular, except for the rows and columns of the result.
// `memory` is for 2 n floats.
template <typename Threads, typename Rows>
inline Range isolate_eigenvalues(Rows h, uint stride, uint n, threadgroup float* memory, threadgroup ushort* order,
                                 thread Threads& team) {
  Range range = {0, n};
  threadgroup float* const remains = memory + n;
  for (uint i = team.index; i < n; i += Threads::kThreads) remains[i] = 1.0f;
  team.wait();
  isolate<false>(h, stride, n, memory, remains, order, range, team);
  isolate<true>(h, stride, n, memory, remains, order, range, team);
  uint place = range.first;
  for (uint i = 0; i < n && team.index == 0; ++i)
    if (remains[i] > 0.0f) order[place++] = ushort(i);
  team.wait();
  return range;
}

constant constexpr uint kBalancePasses = 12;      // 2 or 3 are usual
constant constexpr float kMostBalance = 0x1p48f;  // of a power of two, and its inverse the least
constant constexpr float kMostHarm = 16.0f;

// Makes D⁻¹ h D of h, with powers of two d that bring the norms of each row and of its column together (Parlett and
// Reinsch 1969). The norms include the diagonal, or balancing would harm matrices such as Frank's (James, Langou and
// Lowery 2014).
//
// Rows and columns outside of `range` are scaled by what the others have in it, and have no d of their own.
//
// An error of D⁻¹ h D grows by up to the range of d when the eigenvectors are those of h again. The largest entry is
// `largest` before. The result is whether that entry has shrunk by nearly as much, so that the error is still small
// beside h.
template <typename Threads, typename Rows>
inline bool balance(Rows h, uint stride, uint n, Range range, threadgroup float* d, float largest,
                    thread Threads& team) {
  for (uint i = team.index; i < n; i += Threads::kThreads) d[i] = 1.0f;
  team.wait();
  bool changed = true;
  for (uint pass = 0; pass < kBalancePasses && changed; ++pass) {
    changed = false;
    for (uint i = range.first; i < range.end; ++i) {
      float of_column = 0.0f, of_row = 0.0f;
      for (uint j = range.first + team.index; j < range.end; j += Threads::kThreads) {
        of_column = add_square(of_column, h[j * stride + i]);
        of_row = add_square(of_row, h[i * stride + j]);
      }
      of_column = metal::precise::sqrt(team.sum(of_column));
      of_row = metal::precise::sqrt(team.sum(of_row));
      const float before = d[i];
      float factor = metal::exp2(metal::rint(0.5f * (metal::log2(of_row) - metal::log2(of_column))));
      factor = metal::clamp(factor * before, 1.0f / kMostBalance, kMostBalance) / before;
      const bool better =
          metal::min(of_column, of_row) > 0.0f && of_column * factor + of_row / factor < 0.95f * (of_column + of_row);
      team.wait();
      if (better) {
        for (uint j = team.index; j < n; j += Threads::kThreads) {
          if (j == i) continue;
          h[j * stride + i] *= factor;
          h[i * stride + j] /= factor;
        }
        if (team.index == 0) d[i] = before * factor;
        changed = true;
      }
      team.wait();
    }
  }
  float most = 0.0f, inverse_of_least = 0.0f;
  for (uint i = team.index; i < n; i += Threads::kThreads) {
    most = metal::max(most, d[i]);
    inverse_of_least = metal::max(inverse_of_least, 1.0f / d[i]);
  }
  const float ratio = team.max(most) * team.max(inverse_of_least);
  return largest_entry(h, stride, n, team) * ratio <= kMostHarm * largest;
}

template <typename Threads, typename Number>
inline void set_to_identity(device Number* z, uint n, thread const Threads& team) {
  for (uint i = team.index; i < n; i += Threads::kThreads)
    for (uint j = 0; j < n; ++j) z[j * n + i] = number<Number>(i == j ? 1.0f : 0.0f);
}

constant constexpr uint kAtOnce = 8;  // entries that a thread reads before it writes the first of them

// Applies I - tau v vᴴ from the right to a row x whose entries are `step` apart, in columns first to n - 1; or, with
// COLUMN, its conjugate transpose from the left to a column.
template <bool COLUMN, typename Row, typename Number>
inline void reflect_row(Row x, uint step, uint first, uint n, threadgroup const Number* v, Number tau) {
  Number sum = Number(0.0f);
  for (uint j = first; j < n; ++j) sum = add_product(sum, COLUMN ? conjugate(v[j]) : Number(v[j]), x[j * step]);
  sum = times(COLUMN ? conjugate(tau) : tau, sum);
  for (uint begin = first; begin < n; begin += kAtOnce) {
    Number entries[kAtOnce];
    for (uint c = 0, j = begin; c < kAtOnce; ++c, ++j)
      if (j < n) entries[c] = add_product(x[j * step], -sum, COLUMN ? Number(v[j]) : conjugate(v[j]));
    for (uint c = 0, j = begin; c < kAtOnce; ++c, ++j)
      if (j < n) x[j * step] = entries[c];
  }
}

// Reduces h. v is memory for n numbers. With ACCUMULATE, Z becomes Z times the reflectors.
template <bool ACCUMULATE, typename Threads, typename Rows>
inline void reduce_to_hessenberg(Rows h, uint stride, uint n, device typename Threads::Number* z,
                                 threadgroup typename Threads::Number* v, thread Threads& team) {
  typedef typename Threads::Number Number;
  for (uint k = 0; k + 2 < n; ++k) {
    float largest = 0.0f, squares = 0.0f;
    for (uint i = k + 2 + team.index; i < n; i += Threads::kThreads)
      largest = metal::max(largest, size_of(h[i * stride + k]));
    largest = team.max(largest);
    const Number alpha = h[(k + 1) * stride + k];
    const float scale = scale_to_one(metal::max(largest, size_of(alpha)));
    for (uint i = k + 2 + team.index; i < n; i += Threads::kThreads)
      squares = add_square(squares, h[i * stride + k] * scale);
    const auto r = make_reflector(alpha, largest, team.sum(squares), scale);
    for (uint i = k + 2 + team.index; i < n; i += Threads::kThreads) {
      v[i] = times(h[i * stride + k] * scale, r.inverse);
      h[i * stride + k] = Number(0.0f);
    }
    if (team.index == 0) v[k + 1] = number<Number>(1.0f);
    team.wait();
    if (team.index == 0) h[(k + 1) * stride + k] = r.beta;
    for (uint j = k + 1 + team.index; j < n; j += Threads::kThreads)
      reflect_row<true>(h + j, stride, k + 1, n, v, r.tau);  // column j
    team.wait();
    for (uint i = team.index; i < n; i += Threads::kThreads) {
      reflect_row<false>(h + i * stride, 1, k + 1, n, v, r.tau);
      if (ACCUMULATE) reflect_row<false>(z + i, n, k + 1, n, v, r.tau);
    }
    team.wait();
  }
}

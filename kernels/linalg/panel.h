// Householder reflections of a panel whose rows are in registers. A thread holds PANEL_ROWS whole rows of QR_PANEL
// columns, so that a reflector needs no exchange except for sums, which one reduction gives for all columns at once:
//
//   s_j = sum over the rows below k of x_k x_j,   from which   |x_k|², v_kᵀ x_j = x_kj + s_j / (x_kk - beta),
// and, for j < k, v_jᵀ v_k, from which larft makes T.
//
// Registers need constant indices, so columns rotate: the current column k is always at place 0, and column c at place
// (c - k) mod QR_PANEL. Powers of two first scale each column to a largest entry of about one, so that squares stay in
// range.
#pragma once

#include <metal_stdlib>

#include "householder.h"
#include "qr.h"

constant constexpr uint kPanelSimdgroups = QR_PANEL_THREADS / 32;
constant constexpr uint kStage = 8;                 // columns that are loaded or stored at once
constant constexpr uint kStageStride = kStage + 1;  // a row's stride, against bank conflicts
constant constexpr uint kStageFloats = 32 * kStageStride;

// A column whose sum of squares is below this, after scaling, has only rounding errors.
constant constexpr float kNegligible = 0x1p-100f;

template <uint ROWS>
struct PanelRows {
  float x[ROWS][QR_PANEL];
};

// The places of a thread's rows: the first one, and the distance to each next one.
struct PanelPlace {
  device float* corner;  // the panel's
  uint rows, width;      // the panel's
  uint stride;           // between rows in memory
  uint base, step;       // a simdgroup's lanes hold rows base + lane + step e
  device float* at_base() const thread { return corner + ulong(base) * stride; }
};

// Lanes that differ in bit HALF exchange halves of their first 2 HALF values, and add the values they get to those they
// keep.
template <bool MAXIMUM, uint HALF>
inline void exchange_halves(thread float (&values)[QR_PANEL], uint lane) {
  const bool upper = (lane & HALF) != 0;
#pragma unroll
  for (uint i = 0; i < HALF; ++i) {
    const float low = values[i], high = values[i + HALF];  // copies, since a selected address would be in memory
    const float other = metal::simd_shuffle_xor(upper ? low : high, HALF);
    const float own = upper ? high : low;
    values[i] = MAXIMUM ? metal::max(own, other) : own + other;
  }
}

// Sums (or maxima) over a simdgroup, in which each lane has QR_PANEL values. Lane l gets the result for index l %
// QR_PANEL.
template <bool MAXIMUM>
inline float simdgroup_reduce(thread float (&values)[QR_PANEL], uint lane) {
  exchange_halves<MAXIMUM, 8>(values, lane);
  exchange_halves<MAXIMUM, 4>(values, lane);
  exchange_halves<MAXIMUM, 2>(values, lane);
  exchange_halves<MAXIMUM, 1>(values, lane);
  const float other = metal::simd_shuffle_xor(values[0], 16);
  return MAXIMUM ? metal::max(values[0], other) : values[0] + other;
}

// Sums (or maxima) of up to MOST rows of QR_PANEL values, which are loaded at once. Lanes get results as from
// simdgroup_reduce().
template <bool MAXIMUM, uint MOST>
inline float reduce_partial(threadgroup const float* partial, uint count, uint lane) {
  float value = 0.0f;
#pragma unroll
  for (uint n = 0; n < MOST / 2; ++n) {
    const uint i = 2 * n + lane / QR_PANEL;
    const float other = i < count ? partial[i * QR_PANEL + lane % QR_PANEL] : 0.0f;
    value = MAXIMUM ? metal::max(value, other) : value + other;
  }
  const float other = metal::simd_shuffle_xor(value, 16);
  return MAXIMUM ? metal::max(value, other) : value + other;
}

// Neighbouring lanes read rows in memory kStage columns at a time. `staged`, which each simdgroup has for itself, gives
// each lane its rows. Column `turned` comes to place 0.
template <uint ROWS>
inline void load_panel(thread PanelRows<ROWS>& panel, thread const PanelPlace& at, uint turned,
                       threadgroup float* staged, uint lane) {
  device const float* const from = at.at_base();
#pragma unroll
  for (uint e = 0; e < ROWS; ++e)
#pragma unroll
    for (uint i = 0; i < QR_PANEL; ++i) {
      const uint row = at.step * e + i % kStage * (32 / kStage) + lane / kStage;
      const uint column = (i / kStage * kStage + lane % kStage + turned) % QR_PANEL;
      panel.x[e][i] = at.base + row < at.rows && column < at.width ? from[row * at.stride + column] : 0.0f;
    }
#pragma unroll
  for (uint turn = 0; turn < ROWS * QR_PANEL / kStage; ++turn) {
    const uint e = turn / (QR_PANEL / kStage), s = turn % (QR_PANEL / kStage) * kStage;
#pragma unroll
    for (uint i = 0; i < kStage; ++i)
      staged[(i * (32 / kStage) + lane / kStage) * kStageStride + lane % kStage] = panel.x[e][s + i];
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
#pragma unroll
    for (uint i = 0; i < kStage; ++i) panel.x[e][s + i] = staged[lane * kStageStride + i];
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

template <uint ROWS>
inline void store_panel(thread const PanelRows<ROWS>& panel, thread const PanelPlace& at, uint turned,
                        threadgroup float* staged, uint lane) {
  lane = metal::simd_shuffle(lane, lane);  // hides the value: compilers would keep load_panel's addresses in registers
  device float* const to = at.at_base();
  metal::simdgroup_barrier(metal::mem_flags::mem_device);  // another lane may have read what this one writes
#pragma unroll
  for (uint turn = 0; turn < ROWS * QR_PANEL / kStage; ++turn) {
    const uint e = turn / (QR_PANEL / kStage), s = turn % (QR_PANEL / kStage) * kStage;
#pragma unroll
    for (uint i = 0; i < kStage; ++i) staged[lane * kStageStride + i] = panel.x[e][s + i];
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
#pragma unroll
    for (uint i = 0; i < kStage; ++i) {
      const uint row = at.step * e + i * (32 / kStage) + lane / kStage;
      const uint column = (s + lane % kStage + turned) % QR_PANEL;
      if (at.base + row < at.rows && column < at.width)
        to[row * at.stride + column] = staged[(i * (32 / kStage) + lane / kStage) * kStageStride + lane % kStage];
    }
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

// The largest magnitude of column lane % QR_PANEL.
template <uint ROWS>
inline float column_maxima(thread const PanelRows<ROWS>& panel, uint lane) {
  float most[QR_PANEL];
#pragma unroll
  for (uint j = 0; j < QR_PANEL; ++j) most[j] = 0.0f;
#pragma unroll
  for (uint e = 0; e < ROWS; ++e)
#pragma unroll
    for (uint j = 0; j < QR_PANEL; ++j) most[j] = metal::max(most[j], metal::abs(panel.x[e][j]));
  return simdgroup_reduce<true>(most, lane);
}

// Multiplies each column by its scale, which lane l holds for column l % QR_PANEL. No column has rotated yet.
template <uint ROWS>
inline void scale_columns(thread PanelRows<ROWS>& panel, float scale) {
#pragma unroll
  for (uint j = 0; j < QR_PANEL; ++j) {
    const float s = metal::simd_shuffle(scale, j);
#pragma unroll
    for (uint e = 0; e < ROWS; ++e) panel.x[e][j] *= s;
  }
}

// Undoes the scaling, except below the diagonal: the reflectors there do not depend on a column's scale.
template <uint ROWS>
inline void unscale_upper(thread PanelRows<ROWS>& panel, thread const PanelPlace& at, float scale, uint lane) {
#pragma unroll
  for (uint j = 0; j < QR_PANEL; ++j) {
    const float s = inverse_of_scale(metal::simd_shuffle(scale, j));
#pragma unroll
    for (uint e = 0; e < ROWS; ++e)
      if (at.base + at.step * e + lane <= j) panel.x[e][j] *= s;
  }
}

// s for place lane % QR_PANEL over this simdgroup's rows. Row k, which only one lane of all has, goes to `top`.
template <uint ROWS, typename Pointer>
inline float products_below(thread const PanelRows<ROWS>& panel, thread const PanelPlace& at, uint k, Pointer top,
                            uint lane) {
  float sums[QR_PANEL];
#pragma unroll
  for (uint j = 0; j < QR_PANEL; ++j) sums[j] = 0.0f;
#pragma unroll
  for (uint e = 0; e < ROWS; ++e) {
    const uint row = at.base + at.step * e + lane;
    const float below = row > k ? panel.x[e][0] : 0.0f;
#pragma unroll
    for (uint j = 0; j < QR_PANEL; ++j) sums[j] = metal::fma(below, panel.x[e][j], sums[j]);
  }
  if (at.base + lane == k) {
#pragma unroll
    for (uint j = 0; j < QR_PANEL; ++j) top[j] = panel.x[0][j];
  }
  return simdgroup_reduce<false>(sums, lane);
}

struct PanelReflector {
  Reflector h;
  float product;  // v_kᵀ times the column at place lane % QR_PANEL
};

// The reflector of the column at place 0. `sum` and `top` are s and row k's entry for place lane % QR_PANEL.
inline PanelReflector panel_reflector(float sum, float top) {
  const float squares = metal::simd_shuffle(sum, 0), alpha = metal::simd_shuffle(top, 0);
  const bool negligible = squares > 0.0f && squares <= kNegligible;
  Reflector h = make_reflector(alpha, squares, squares, 1.0f);
  if (negligible) h = {-alpha, 2.0f, 0.0f};  // rounding gives the same if alpha is not negligible
  return {h, metal::fma(sum, h.inverse, top)};
}

// Applies reflector k to the columns on its right, and stores it in its own column.
template <uint ROWS>
inline void apply_reflector(thread PanelRows<ROWS>& panel, thread const PanelPlace& at, uint k,
                            thread const PanelReflector& reflector, uint lane) {
  const float factor = reflector.h.tau * reflector.product;
  float v[ROWS];
#pragma unroll
  for (uint e = 0; e < ROWS; ++e) {
    const uint row = at.base + at.step * e + lane;
    v[e] = row > k ? panel.x[e][0] * reflector.h.inverse : row == k ? 1.0f : 0.0f;
    panel.x[e][0] = row > k ? v[e] : row == k ? reflector.h.beta : panel.x[e][0];
  }
#pragma unroll
  for (uint j = 1; j < QR_PANEL; ++j) {
    const float f = k + j < QR_PANEL ? -metal::simd_shuffle(factor, j) : 0.0f;
#pragma unroll
    for (uint e = 0; e < ROWS; ++e) panel.x[e][j] = metal::fma(f, v[e], panel.x[e][j]);
  }
}

template <uint ROWS>
inline void turn_columns(thread PanelRows<ROWS>& panel) {
#pragma unroll
  for (uint e = 0; e < ROWS; ++e) {
    const float first = panel.x[e][0];
#pragma unroll
    for (uint j = 0; j + 1 < QR_PANEL; ++j) panel.x[e][j] = panel.x[e][j + 1];
    panel.x[e][QR_PANEL - 1] = first;
  }
}

// Adds column k to the products for write_factor(). One simdgroup calls it.
template <typename Pointer>
inline void keep_products(Pointer products, uint k, thread const PanelReflector& reflector, uint lane) {
  const uint column = (k + lane) % QR_PANEL;
  if (lane < QR_PANEL && column <= k)
    products[column * QR_PANEL + k] = column < k ? reflector.product : reflector.h.tau;
}

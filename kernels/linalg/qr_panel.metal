// QR of a panel of QR_PANEL columns, and its factor T (factor.h). V replaces the panel below its diagonal, R above.
#include <metal_stdlib>
using namespace metal;

#include "factor.h"
#include "householder.h"
#include "qr.h"
#include "scalars.h"

// Householder reflections of a panel whose rows are in registers. A thread holds PANEL_ROWS whole rows of QR_PANEL
// columns, so that a reflector needs no exchange except for sums, which one reduction gives for all columns at once:
//
//   s_j = sum over the rows below k of x_k x_j,   from which   |x_k|², v_kᵀ x_j = x_kj + s_j / (x_kk - beta),
// and, for j < k, v_jᵀ v_k, from which larft makes T.
//
// Registers need constant indices, so columns rotate: the current column k is always at place 0, and column c at place
// (c - k) mod QR_PANEL. Powers of two first scale each column to a largest entry of about one, so that squares stay in
// range.
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

inline device float* panel_corner(device float* a, constant QrPanelParams& p, uint matrix) {
  return a + (ulong(matrix) * p.rows + p.first) * p.columns + p.first;
}

// A panel of up to QR_PANEL_THREADS * QR_PANEL_ROWS rows, by one threadgroup in which a thread has QR_PANEL_ROWS rows.
// A reflector takes one barrier: sums and row k go to the other of two places each time.
[[kernel]] [[max_total_threads_per_threadgroup(QR_PANEL_THREADS)]] void qr_panel(
    device float* a [[buffer(0)]], device float* t [[buffer(1)]], device float* tau [[buffer(2)]],
    constant QrPanelParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint threads [[threads_per_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float staged[kPanelSimdgroups * kStageFloats];
  threadgroup float partial[2 * kPanelSimdgroups * QR_PANEL];
  threadgroup float top[2 * QR_PANEL];
  threadgroup float products[QR_PANEL * QR_PANEL];
  const PanelPlace at = {panel_corner(a, p, matrix), p.rows - p.first, p.width, p.columns, simdgroup * 32, threads};
  threadgroup float* const turning = staged + simdgroup * kStageFloats;
  const uint simdgroups = threads / 32;

  PanelRows<QR_PANEL_ROWS> panel;
  load_panel(panel, at, 0, turning, lane);
  const float largest = column_maxima(panel, lane);
  if (lane < QR_PANEL) partial[(kPanelSimdgroups + simdgroup) * QR_PANEL + lane] = largest;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float scale =
      scale_to_one(reduce_partial<true, kPanelSimdgroups>(partial + kPanelSimdgroups * QR_PANEL, simdgroups, lane));
  scale_columns(panel, scale);

  for (uint k = 0; k < QR_PANEL; ++k) {
    threadgroup float* const sums = partial + (k & 1) * kPanelSimdgroups * QR_PANEL;
    threadgroup float* const row = top + (k & 1) * QR_PANEL;
    const float sum = products_below(panel, at, k, row, lane);
    if (lane < QR_PANEL) sums[simdgroup * QR_PANEL + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const PanelReflector reflector =
        panel_reflector(reduce_partial<false, kPanelSimdgroups>(sums, simdgroups, lane), row[lane % QR_PANEL]);
    apply_reflector(panel, at, k, reflector, lane);
    turn_columns(panel);
    if (simdgroup == 0) keep_products(products, k, reflector, lane);
  }
  unscale_upper(panel, at, scale, lane);
  store_panel(panel, at, 0, turning, lane);

  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup > 0 || lane >= QR_PANEL) return;
  write_factor(products, QR_PANEL, t + ulong(matrix) * (QR_PANEL * QR_PANEL), QR_PANEL, lane);
  if (lane < p.width) tau[ulong(matrix) * p.count + p.first + lane] = products[lane * QR_PANEL + lane];
}

// A panel of any number of rows, of which a threadgroup takes a slab of QR_SLAB_ROWS. There is a dispatch for each
// reflector, which applies it and sums for the next one. The slabs' sums are contiguous in device memory, and the next
// reflector's row follows them. `state` keeps the scales of the columns and the products from which T is made.
enum SlabStage { kMaxima, kScale, kStep, kLast };

constant constexpr uint kSlabSimdgroups = QR_SLAB_THREADS / 32;
constant constexpr uint kSlabRows = QR_SLAB_ROWS / QR_SLAB_THREADS;  // rows that a thread holds

// Sums (or maxima) over all slabs for place lane % QR_PANEL. Every simdgroup takes some slabs.
template <bool MAXIMUM>
inline float over_slabs(device const float* sums, uint slabs, threadgroup float* partial, uint simdgroup, uint lane) {
  const uint each = (slabs + kSlabSimdgroups - 1) / kSlabSimdgroups;
  const uint first = min(simdgroup * each, slabs);
  const uint end = min(first + each, slabs);
  float value = 0.0f;
  for (uint i = first + lane / QR_PANEL; i < end; i += 2) {
    const float other = sums[i * QR_PANEL + lane % QR_PANEL];
    value = MAXIMUM ? max(value, other) : value + other;
  }
  const float other = simd_shuffle_xor(value, 16);
  value = MAXIMUM ? max(value, other) : value + other;
  if (lane < QR_PANEL) partial[simdgroup * QR_PANEL + lane] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return reduce_partial<MAXIMUM, kSlabSimdgroups>(partial, kSlabSimdgroups, lane);
}

template <SlabStage STAGE>
[[kernel]] [[max_total_threads_per_threadgroup(QR_SLAB_THREADS)]] void qr_panel_slab(
    device float* a [[buffer(0)]], device float* t [[buffer(1)]], device float* tau [[buffer(2)]],
    constant QrPanelParams& p [[buffer(3)]], device const float* before [[buffer(4)]],
    device float* after [[buffer(5)]], device float* state [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float staged[kSlabSimdgroups * kStageFloats];
  threadgroup float partial[2 * kSlabSimdgroups * QR_PANEL];
  const uint matrix = group / p.slabs, slab = group % p.slabs;
  const PanelPlace at = {panel_corner(a, p, matrix),           p.rows - p.first, p.width, p.columns,
                         slab * QR_SLAB_ROWS + simdgroup * 32, QR_SLAB_THREADS};
  threadgroup float* const turning = staged + simdgroup * kStageFloats;
  const uint turned = STAGE == kStep || STAGE == kLast ? p.step : 0;
  before += ulong(matrix) * (p.slabs + 1) * QR_PANEL;
  after += ulong(matrix) * (p.slabs + 1) * QR_PANEL;
  device float* const scales = state + ulong(matrix) * QR_SLAB_STATE;
  device float* const products = scales + QR_PANEL;

  PanelRows<kSlabRows> panel;
  load_panel(panel, at, turned, turning, lane);
  if (STAGE == kScale) {
    const float scale = scale_to_one(over_slabs<true>(before, p.slabs, partial, simdgroup, lane));
    scale_columns(panel, scale);
    if (slab == 0 && simdgroup == 0 && lane < QR_PANEL) scales[lane] = scale;
  }
  if (STAGE == kStep || STAGE == kLast) {
    const PanelReflector reflector = panel_reflector(over_slabs<false>(before, p.slabs, partial, simdgroup, lane),
                                                     before[p.slabs * QR_PANEL + lane % QR_PANEL]);
    apply_reflector(panel, at, p.step, reflector, lane);
    turn_columns(panel);
    if (slab == 0 && simdgroup == 0) keep_products(products, p.step, reflector, lane);
  }
  if (STAGE == kLast) {
    unscale_upper(panel, at, scales[lane % QR_PANEL], lane);
    store_panel(panel, at, 0, turning, lane);
    simdgroup_barrier(mem_flags::mem_device);
    if (slab > 0 || simdgroup > 0 || lane >= QR_PANEL) return;
    write_factor(products, QR_PANEL, t + ulong(matrix) * (QR_PANEL * QR_PANEL), QR_PANEL, lane);
    if (lane < p.width) tau[ulong(matrix) * p.count + p.first + lane] = products[lane * QR_PANEL + lane];
    return;
  }

  if (STAGE == kScale || STAGE == kStep) store_panel(panel, at, STAGE == kStep ? turned + 1 : 0, turning, lane);
  const float value =
      STAGE == kMaxima ? column_maxima(panel, lane)
                       : products_below(panel, at, STAGE == kStep ? p.step + 1 : 0, after + p.slabs * QR_PANEL, lane);
  threadgroup float* const sums = partial + kSlabSimdgroups * QR_PANEL;
  if (lane < QR_PANEL) sums[simdgroup * QR_PANEL + lane] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup > 0) return;
  const float total = reduce_partial<STAGE == kMaxima, kSlabSimdgroups>(sums, kSlabSimdgroups, lane);
  if (lane < QR_PANEL) after[slab * QR_PANEL + lane] = total;
}

#define INSTANTIATE(name, stage)                                                                                  \
  template [[host_name(name)]] [[kernel]] void qr_panel_slab<stage>(device float*, device float*, device float*,  \
                                                                    constant QrPanelParams&, device const float*, \
                                                                    device float*, device float*, uint, uint, uint);

INSTANTIATE("qr_panel_maxima", kMaxima)
INSTANTIATE("qr_panel_scale", kScale)
INSTANTIATE("qr_panel_step", kStep)
INSTANTIATE("qr_panel_last", kLast)

// The results, one thread per element: the first columns of the identity, from which Q is made, and the upper triangle
// that the panels left.
template <typename T>
[[kernel]] void qr_identity(device T* q [[buffer(0)]], constant QrResultParams& p [[buffer(1)]],
                            uint at [[thread_position_in_grid]]) {
  q[at] = number<T>(at / p.columns % p.rows == at % p.columns ? 1.0f : 0.0f);
}

template [[host_name("qr_identity")]] [[kernel]] void qr_identity<float>(device float*, constant QrResultParams&, uint);
template [[host_name("qr_identity_complex")]] [[kernel]] void qr_identity<float2>(device float2*,
                                                                                  constant QrResultParams&, uint);

[[kernel]] void qr_upper(device float* r [[buffer(0)]], constant QrResultParams& p [[buffer(1)]],
                         device const float* a [[buffer(2)]], uint at [[thread_position_in_grid]]) {
  const uint column = at % p.columns, row = at / p.columns % p.rows, matrix = at / p.columns / p.rows;
  r[at] = row <= column ? a[(ulong(matrix) * p.source_rows + row) * p.columns + column] : 0.0f;
}

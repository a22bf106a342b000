// QR of a panel of QR_PANEL columns, and its factor T (factor.h). V replaces the panel below its diagonal, R above.
#include <metal_stdlib>
using namespace metal;

#include "factor.h"
#include "panel.h"
#include "qr.h"

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

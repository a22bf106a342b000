
#include "qr.h"
#include "../../../kernels/linalg/qr.h"
#include "../../../kernels/linalg/reflectors.h"

#include <algorithm>

namespace metalcore {

namespace {

constexpr uint32_t kPanelRows = QR_PANEL_THREADS * QR_PANEL_ROWS;  // the most that one threadgroup holds

uint32_t slabs_of(uint32_t rows) { return ceil_div<uint32_t>(rows, QR_SLAB_ROWS); }

uint32_t panel_threads(uint32_t rows) { return round_up(ceil_div<uint32_t>(rows, QR_PANEL_ROWS), gpu::kSimdWidth); }

}  // namespace

BlockedQr::BlockedQr(const RowMajor& a, const Tensor& tau, uint32_t batch, uint32_t columns)
    : a_(a), tau_(tau), batch_(batch), reflectors_(a, tau, batch, std::min(a.rows, a.columns), columns) {
  panel_factor_ = new_tensor({batch, QR_PANEL, QR_PANEL}, ScalarType::Float, a.tensor);
  if (a.rows <= kPanelRows) return;
  for (Tensor& sums : sums_) sums = new_tensor({batch, slabs_of(a.rows) + 1, QR_PANEL}, ScalarType::Float, a.tensor);
  state_ = new_tensor({batch, QR_SLAB_STATE}, ScalarType::Float, a.tensor);
}

void BlockedQr::factor_panel(gpu::Recording& recording, ReflectorRange range) const {
  const uint32_t rows = a_.rows - range.first;
  QrPanelParams p{a_.rows, a_.columns, range.first, range.width, reflectors_.count(), slabs_of(rows), 0};
  const double entries = 1.0 * batch_ * rows * range.width;
  auto bind = [&](const char* kernel) {
    recording.kernel(kernel).buffer(0, a_.tensor).buffer(1, panel_factor_).buffer(2, tau_).bytes(3, p);
  };
  if (rows <= kPanelRows) {
    bind("qr_panel");
    recording.work(4 * entries * range.width, 8 * entries);
    recording.dispatch_threadgroups({batch_}, {panel_threads(rows)});
    return;
  }
  uint32_t turn = 0;
  auto slabs = [&](const char* kernel) {
    bind(kernel);
    recording.work(4 * entries, 8 * entries);  // of one column
    recording.buffer(4, sums_[turn % 2]).buffer(5, sums_[(turn + 1) % 2]).buffer(6, state_);
    recording.dispatch_threadgroups({grid_side(int64_t{batch_} * p.slabs)}, {QR_SLAB_THREADS});
    ++turn;
  };
  slabs("qr_panel_maxima");
  slabs("qr_panel_scale");
  for (; p.step + 1 < QR_PANEL; ++p.step) slabs("qr_panel_step");
  slabs("qr_panel_last");
}

// Each panel of a block is applied to the block's other columns, and then the whole block to the columns on its right.
void BlockedQr::factor(gpu::Recording& recording, bool for_q) const {
  for (uint32_t b = 0; b < reflectors_.blocks(); ++b) {
    const ReflectorRange block = reflectors_.block(b);
    const uint32_t end = block.first + block.width;
    for (uint32_t first = block.first; first < end; first += QR_PANEL) {
      const ReflectorRange panel{first, std::min<uint32_t>(QR_PANEL, end - first)};
      factor_panel(recording, panel);
      reflectors_.apply_narrow(recording, panel, panel_factor_, first + panel.width, end);
    }
    if (for_q || end < a_.columns) reflectors_.factor_and_update(recording, b);
  }
}

void dispatch_elements(gpu::Recording& recording, int64_t count) {
  recording.dispatch_threads({grid_side(count)}, {256});
}

void set_identity(gpu::Recording& recording, const RowMajor& q) {
  recording.kernel("qr_identity").buffer(0, q.tensor).bytes(1, QrResultParams{q.rows, q.columns, 0});
  dispatch_elements(recording, q.tensor.numel());
}

// The blocks go from the last to the first, so that none changes a column before its own.
void form_q(gpu::Recording& recording, const BlockReflectors& reflectors, const RowMajor& q) {
  set_identity(recording, q);
  for (uint32_t i = reflectors.blocks(); i-- > 0;)
    reflectors.apply(recording, i, q, reflectors.block(i).first, q.columns, false);
}

}  // namespace metalcore

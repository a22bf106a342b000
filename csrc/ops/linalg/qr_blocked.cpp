#include "qr_blocked.h"

#include "../../../kernels/linalg/qr.h"
#include "../../../kernels/linalg/reflectors.h"

#include <algorithm>

namespace metalcore {

namespace {

constexpr uint32_t kPanelRows = QR_PANEL_THREADS * QR_PANEL_ROWS;  // that one threadgroup holds

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

void BlockedQr::panel(gpu::Recording& recording, Reflectors of) const {
  const uint32_t rows = a_.rows - of.first;
  QrPanelParams p{a_.rows, a_.columns, of.first, of.width, reflectors_.count(), slabs_of(rows), 0};
  auto bind = [&](const char* kernel) {
    recording.kernel(kernel).buffer(0, a_.tensor).buffer(1, panel_factor_).buffer(2, tau_).bytes(3, p);
  };
  if (rows <= kPanelRows) {
    bind("qr_panel");
    recording.dispatch_threadgroups({batch_}, {panel_threads(rows)});
    return;
  }
  uint32_t turn = 0;
  auto slabs = [&](const char* kernel) {
    bind(kernel);
    recording.buffer(4, sums_[turn % 2]).buffer(5, sums_[(turn + 1) % 2]).buffer(6, state_);
    recording.dispatch_threadgroups({grid_side(int64_t{batch_} * p.slabs)}, {QR_SLAB_THREADS});
    ++turn;
  };
  slabs("qr_panel_maxima");
  slabs("qr_panel_scale");
  for (; p.step + 1 < QR_PANEL; ++p.step) slabs("qr_panel_step");
  slabs("qr_panel_last");
}

// A block's panels one after the other, each applied to the block's other columns; then all of them to the columns on
// the block's right.
void BlockedQr::factor(gpu::Recording& recording, bool q_wanted) const {
  for (uint32_t b = 0; b < reflectors_.blocks(); ++b) {
    const Reflectors block = reflectors_.block(b);
    const uint32_t end = block.first + block.width;
    for (uint32_t first = block.first; first < end; first += QR_PANEL) {
      const Reflectors of{first, std::min<uint32_t>(QR_PANEL, end - first)};
      panel(recording, of);
      reflectors_.apply_narrow(recording, of, panel_factor_, first + of.width, end);
    }
    if (q_wanted || end < a_.columns) reflectors_.factor_and_update(recording, b);
  }
}

void dispatch_elements(gpu::Recording& recording, int64_t count) {
  recording.dispatch_threads({grid_side(count)}, {256});
}

void identity(gpu::Recording& recording, const RowMajor& q) {
  recording.kernel("qr_identity").buffer(0, q.tensor).bytes(1, QrResultParams{q.rows, q.columns, 0});
  dispatch_elements(recording, q.tensor.numel());
}

// From the last block to the first, so that a block changes no column before its own.
void form_q(gpu::Recording& recording, const BlockReflectors& reflectors, const RowMajor& q) {
  identity(recording, q);
  for (uint32_t i = reflectors.blocks(); i-- > 0;)
    reflectors.apply(recording, i, q, reflectors.block(i).first, q.columns, false);
}

}  // namespace metalcore

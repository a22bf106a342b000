// geqrf(A) -> (a, tau), householder_product(A, tau) -> Q and ormqr(A, tau, C, left, transpose) -> Q C: QR's
// reflectors as LAPACK packs them, in matrices of any strides, float32 or, except of ormqr, complex64. Results are
// row-major.
#include "qr.h"
#include "../../../kernels/linalg/qr.h"
#include "cpu_route.h"
#include "matrices.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

RowMajor copy(const Tensor& a, const MatrixShape& shape) {
  Tensor copied = new_tensor(a.sizes(), ScalarType::Float, a);
  torch::stable::copy_(copied, a);
  return {copied, grid_side(shape.rows), grid_side(shape.columns)};
}

RowMajor contiguous(const Tensor& a, const MatrixShape& shape) {
  return {as_contiguous(a), grid_side(shape.rows), grid_side(shape.columns)};
}

std::tuple<Tensor, Tensor> geqrf(const Tensor& input) {
  check_number("geqrf", "A", input);
  check(input.dim() >= 2, "torch.geqrf: input must have at least 2 dimensions.");
  const MatrixShape s = matrix_shape(input.sizes());
  const int64_t count = std::min(s.rows, s.columns);
  const Tensor tau = new_tensor(batch_sizes(input, {count}), input.scalar_type(), input);
  const QrTuning& tuning = qr_tuning(input);
  QrPlan plan = plan_reflectors(s.rows, s.columns, s.batch, 0, is_complex(input), tuning);
  if (!is_left(plan.variant) && plan.variant != QrVariant::empty && tuning.geqrf_torch.contain(count, s.batch))
    plan = {QrVariant::torch, times(s.rows, s.columns) + ": " + faster_by_torch(tuning.family), "", 0, {}};
  gpu::note_plan("geqrf", name_of(plan.variant), [&] { return plan.why; });
  if (s.batch == 0 || plan.variant == QrVariant::empty) return {new_like(input), tau};
  if (is_left(plan.variant)) {
    const auto [packed, torch_tau] = call_left<2>(plan.variant, "aten::geqrf", input);
    return {as_contiguous(packed), as_contiguous(torch_tau)};
  }
  if (plan.variant == QrVariant::blocked) {
    const RowMajor packed = copy(input, s);
    const BlockedQr factors(packed, tau, grid_side(s.batch), packed.columns);
    gpu::record(input, [&](gpu::Recording& recording) { factors.factor(recording, false); });
    return {packed.tensor, tau};
  }
  const Tensor packed = new_like(input);
  run_small(plan, matrices(input), {QR_REFLECTORS, grid_side(count), 0, grid_side(s.rows)}, packed, packed, tau);
  return {packed, tau};
}

// QR's plan, except for products that PyTorch's op makes faster.
QrPlan plan_product(const MatrixShape& s, int64_t count, bool is_complex, const QrTuning& tuning) {
  if (tuning.householder_product_cpu.contain(count, s.batch))
    return {QrVariant::cpu, std::to_string(count) + " reflectors: " + faster_on_cpu(tuning.family), "", 0, {}};
  QrPlan plan = plan_reflectors(s.rows, s.columns, s.batch, s.columns, is_complex, tuning);
  if (plan.variant == QrVariant::blocked && tuning.householder_product_torch.contain(count, s.batch))
    return {
        QrVariant::torch, times(s.rows, s.columns) + ", a single matrix: " + faster_by_torch(tuning.family), "", 0, {}};
  return plan;
}

Tensor householder_product(const Tensor& input, const Tensor& tau) {
  check_number("householder_product", "A", input);
  check_same_dtype("householder_product", "tau", tau, input);
  check(input.dim() >= 2 && tau.dim() == input.dim() - 1,
        "metalcore::householder_product: A must be (*, m, n) and tau "
        "(*, k), not ",
        shape_text(input), " and ", shape_text(tau));
  const MatrixShape s = matrix_shape(input.sizes());
  const int64_t count = tau.size(-1);
  check(s.rows >= s.columns && s.columns >= count && tau.numel() == s.batch * count,
        "metalcore::householder_product: A must be (*, m, n) and tau (*, k) with m >= n >= k, not ", shape_text(input),
        " and ", shape_text(tau));
  const Tensor q = new_like(input);
  if (q.numel() == 0) return q;
  const QrPlan plan = plan_product(s, count, is_complex(input), qr_tuning(input));
  gpu::note_plan("householder_product", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant))
    return as_contiguous(call_left<1>(plan.variant, "aten::linalg_householder_product", input, tau)[0]);
  const Tensor taus = as_contiguous(tau);
  const RowMajor result{q, grid_side(s.rows), grid_side(s.columns)};
  if (count == 0) {
    gpu::record(q, [&](gpu::Recording& recording) { set_identity(recording, result); });
  } else if (plan.variant == QrVariant::blocked) {
    const RowMajor v = contiguous(input, s);
    const BlockReflectors reflectors(v, taus, grid_side(s.batch), grid_side(count), v.columns);
    gpu::record(q, [&](gpu::Recording& recording) {
      reflectors.factor_all(recording);
      form_q(recording, reflectors, result);
    });
  } else {
    run_small(plan, matrices(input), {QR_FORM, grid_side(count), result.columns, 0}, q, q, taus);
  }
  return q;
}

struct OrmqrPlan {
  QrVariant variant;
  std::string why;
};
OrmqrPlan plan_ormqr(int64_t count, int64_t batch, const QrTuning& tuning) {
  const std::string reflectors = std::to_string(count) + " reflectors";
  if (count == 0) return {QrVariant::empty, "there are no reflectors"};
  if (tuning.ormqr_cpu.contain(count, batch)) return {QrVariant::cpu, reflectors + ": " + faster_on_cpu(tuning.family)};
  if (tuning.ormqr_torch.contain(count, batch))
    return {QrVariant::torch, reflectors + " of a single matrix: " + faster_by_torch(tuning.family)};
  return {QrVariant::blocked,
          reflectors + " by block reflectors of up to " + std::to_string(BlockReflectors::width_of(count))};
}

Tensor ormqr(const Tensor& input, const Tensor& tau, const Tensor& other, bool left, bool transpose) {
  check_float32("ormqr", "input", input);
  check_float32("ormqr", "tau", tau);
  check_float32("ormqr", "other", other);
  check(input.dim() >= 2 && tau.dim() == input.dim() - 1 && other.dim() == input.dim(),
        "metalcore::ormqr: input must be (*, m, k), tau (*, k) and other (*, m, n), not ", shape_text(input), ", ",
        shape_text(tau), " and ", shape_text(other));
  const MatrixShape s = matrix_shape(input.sizes()), c = matrix_shape(other.sizes());
  const int64_t count = tau.size(-1);
  check((left ? c.rows : c.columns) == s.rows && count <= std::min(s.rows, s.columns) && c.batch == s.batch &&
            tau.numel() == s.batch * count,
        "metalcore::ormqr: input must be (*, m, k), tau (*, k) and other (*, m, n), or (*, n, m) on the left of Q, ",
        "not ", shape_text(input), ", ", shape_text(tau), " and ", shape_text(other));
  const OrmqrPlan plan = plan_ormqr(count, s.batch, qr_tuning(input));
  gpu::note_plan("ormqr", name_of(plan.variant), [&] { return plan.why; });
  if (other.numel() > 0 && is_left(plan.variant))
    return as_contiguous(call_left<1>(plan.variant, "aten::ormqr", input, tau, other, left, transpose)[0]);
  // C Q is (Qᵀ Cᵀ)ᵀ.
  const Tensor c_left = left ? other : transposed(other);
  const RowMajor target = copy(c_left, matrix_shape(c_left.sizes()));
  if (other.numel() > 0 && plan.variant == QrVariant::blocked) {
    const RowMajor v = contiguous(input, s);
    const BlockReflectors reflectors(v, as_contiguous(tau), grid_side(s.batch), grid_side(count),
                                     std::max(target.columns, grid_side(count)));
    gpu::record(input, [&](gpu::Recording& recording) {
      reflectors.factor_all(recording);
      reflectors.apply_all(recording, target, left == transpose);
    });
  }
  return left ? target.tensor : as_contiguous(transposed(target.tensor));
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("geqrf(Tensor A) -> (Tensor, Tensor)");
  m.def("householder_product(Tensor A, Tensor tau) -> Tensor");
  m.def("ormqr(Tensor input, Tensor tau, Tensor other, bool left, bool transpose) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::geqrf>("geqrf");
  m.impl<&metalcore::householder_product>("householder_product");
  m.impl<&metalcore::ormqr>("ormqr");
}

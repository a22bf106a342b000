// geqrf(A) -> (a, tau), householder_product(A, tau) -> Q and ormqr(A, tau, C, left, transpose) -> Q C: QR's reflectors
// as such, packed as LAPACK packs them, float32, of any strides; row-major results.
#include "../../../kernels/linalg/qr.h"
#include "../../../kernels/linalg/reflectors.h"
#include "matrices.h"
#include "qr_blocked.h"
#include "qr_plan.h"
#include "qr_small.h"
#include "../plan.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

// A contiguous copy.
RowMajor copy(const Tensor& a, const MatrixShape& shape) {
  Tensor taken = new_tensor(a.sizes(), ScalarType::Float, a);
  torch::stable::copy_(taken, a);
  return {taken, grid_side(shape.rows), grid_side(shape.columns)};
}

RowMajor contiguous(const Tensor& a, const MatrixShape& shape) {
  return {as_contiguous(a), grid_side(shape.rows), grid_side(shape.columns)};
}

std::tuple<Tensor, Tensor> geqrf(const Tensor& input) {
  check_float32("geqrf", "A", input);
  check(input.dim() >= 2, "torch.geqrf: input must have at least 2 dimensions.");
  const MatrixShape s = matrix_shape(input.sizes());
  const int64_t count = std::min(s.rows, s.columns);
  const Tensor tau = new_tensor(batch_sizes(input, {count}), ScalarType::Float, input);
  const gpu::Tuning& tuning = gpu::tuning(input);
  const QrPlan plan = plan_reflectors(s.rows, s.columns, s.batch, 0, tuning);
  if (s.batch == 0 || plan.variant == QrVariant::empty) return {new_like(input), tau};
  if (plan.variant == QrVariant::torch) {
    const auto [packed, theirs] = call_torch<2>("aten::geqrf", "", input);
    return {as_contiguous(packed), as_contiguous(theirs)};
  }
  if (plan.variant == QrVariant::blocked) {
    const RowMajor packed = copy(input, s);
    const BlockedQr factors(packed, tau, grid_side(s.batch), packed.columns, tuning);
    gpu::encode(input, [&](gpu::Encoder& encoder) { factors.factor(encoder, false); });
    return {packed.tensor, tau};
  }
  const Tensor packed = new_tensor(input.sizes(), ScalarType::Float, input);
  run_small(plan, matrices(input), {QR_REFLECTORS, grid_side(count), 0, grid_side(s.rows)}, packed, packed, tau);
  return {packed, tau};
}

// As QR's plan, but for what PyTorch applies faster than it factors.
QrPlan plan_product(const MatrixShape& s, int64_t count, const gpu::Tuning& tuning) {
  QrPlan plan = plan_reflectors(s.rows, s.columns, s.batch, s.columns, tuning);
  if (plan.variant == QrVariant::blocked && tuning.householder_product_torch.takes(count, s.batch))
    return {QrVariant::torch,
            times(s.rows, s.columns) + ", a single matrix: PyTorch's own op is faster on this GPU",
            "",
            0,
            {}};
  return plan;
}

Tensor householder_product(const Tensor& input, const Tensor& tau) {
  check_float32("householder_product", "A", input);
  check_float32("householder_product", "tau", tau);
  check(input.dim() >= 2 && tau.dim() == input.dim() - 1,
        "metalcore::householder_product: A must be (*, m, n) and tau "
        "(*, k), not ",
        shape_text(input), " and ", shape_text(tau));
  const MatrixShape s = matrix_shape(input.sizes());
  const int64_t count = tau.size(-1);
  check(s.rows >= s.columns && s.columns >= count && tau.numel() == s.batch * count,
        "metalcore::householder_product: A must be (*, m, n) and tau (*, k) with m >= n >= k, not ", shape_text(input),
        " and ", shape_text(tau));
  const Tensor q = new_tensor(input.sizes(), ScalarType::Float, input);
  if (q.numel() == 0) return q;
  const gpu::Tuning& tuning = gpu::tuning(input);
  const QrPlan plan = plan_product(s, count, tuning);
  if (plan.variant == QrVariant::torch)
    return as_contiguous(call_torch<1>("aten::linalg_householder_product", "", input, tau)[0]);
  const Tensor taus = as_contiguous(tau);
  const RowMajor result{q, grid_side(s.rows), grid_side(s.columns)};
  if (count == 0) {
    gpu::encode(q, [&](gpu::Encoder& encoder) { identity(encoder, result); });
  } else if (plan.variant == QrVariant::blocked) {
    const RowMajor v = contiguous(input, s);
    const BlockReflectors reflectors(v, taus, grid_side(s.batch), grid_side(count), v.columns, tuning);
    gpu::encode(q, [&](gpu::Encoder& encoder) {
      reflectors.factor_all(encoder);
      form_q(encoder, reflectors, result);
    });
  } else {
    run_small(plan, matrices(input), {QR_FORM, grid_side(count), result.columns, 0}, q, q, taus);
  }
  return q;
}

QrVariant plan_ormqr(int64_t count, int64_t batch, const gpu::Tuning& tuning) {
  if (count == 0) return QrVariant::empty;
  return tuning.ormqr_torch.takes(count, batch) ? QrVariant::torch : QrVariant::blocked;
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
  const gpu::Tuning& tuning = gpu::tuning(input);
  const QrVariant variant = plan_ormqr(count, s.batch, tuning);
  if (other.numel() > 0 && variant == QrVariant::torch)
    return as_contiguous(call_torch<1>("aten::ormqr", "", input, tau, other, left, transpose)[0]);
  // C Q is (Qᵀ Cᵀ)ᵀ.
  const Tensor c_left = left ? other : transposed(other);
  const RowMajor target = copy(c_left, matrix_shape(c_left.sizes()));
  if (other.numel() > 0 && variant == QrVariant::blocked) {
    const RowMajor v = contiguous(input, s);
    const BlockReflectors reflectors(v, as_contiguous(tau), grid_side(s.batch), grid_side(count),
                                     std::max(target.columns, grid_side(count)), tuning);
    gpu::encode(input, [&](gpu::Encoder& encoder) {
      reflectors.factor_all(encoder);
      reflectors.apply_all(encoder, target, left == transpose);
    });
  }
  return left ? target.tensor : as_contiguous(transposed(target.tensor));
}

Explanation explain_geqrf(const Request& request) {
  check(request.shapes.size() == 1 && request.shapes[0].size() >= 2, "metalcore::geqrf: explain needs the shape of A");
  const MatrixShape s = matrix_shape(request.shapes[0]);
  const gpu::Tuning& tuning = gpu::tuning(request.device_type);
  const QrPlan plan = plan_reflectors(s.rows, s.columns, s.batch, 0, tuning);
  Explanation e{name_of(plan.variant), plan.why, {}};
  const uint32_t batch = grid_side(s.batch);
  if (plan.variant == QrVariant::simd || plan.variant == QrVariant::block) e.steps = {small_step(plan, batch)};
  if (plan.variant == QrVariant::blocked)
    e.steps = BlockedQr::steps(grid_side(s.rows), grid_side(s.columns), batch, false, tuning);
  return e;
}

Explanation explain_householder_product(const Request& request) {
  check(request.shapes.size() == 2 && request.shapes[0].size() >= 2 && request.shapes[1].size() >= 1,
        "metalcore::householder_product: explain needs the shapes of A and tau");
  const MatrixShape s = matrix_shape(request.shapes[0]);
  const gpu::Tuning& tuning = gpu::tuning(request.device_type);
  const QrPlan plan = plan_product(s, request.shapes[1].back(), tuning);
  Explanation e{name_of(plan.variant), plan.why, {}};
  const uint32_t batch = grid_side(s.batch), count = grid_side(request.shapes[1].back());
  if (plan.variant == QrVariant::simd || plan.variant == QrVariant::block) e.steps = {small_step(plan, batch)};
  if (plan.variant == QrVariant::blocked && count > 0) {
    e.steps = BlockReflectors::factor_steps(grid_side(s.rows), batch, count, tuning);
    e.steps.push_back({"qr_identity", {grid_side(s.batch * s.rows * s.columns)}, {256}, true});
    for (const Step& step : BlockReflectors::apply_steps(grid_side(s.rows), batch, count, grid_side(s.columns), tuning))
      e.steps.push_back(step);
  }
  return e;
}

Explanation explain_ormqr(const Request& request) {
  check(request.shapes.size() == 3 && request.shapes[0].size() >= 2 && request.shapes[1].size() >= 1 &&
            request.shapes[2].size() >= 2,
        "metalcore::ormqr: explain needs the shapes of input, tau and other");
  const MatrixShape s = matrix_shape(request.shapes[0]), c = matrix_shape(request.shapes[2]);
  const gpu::Tuning& tuning = gpu::tuning(request.device_type);
  const bool left = request.option("left", "True") == "True";
  const uint32_t count = grid_side(request.shapes[1].back());
  const QrVariant variant = plan_ormqr(count, s.batch, tuning);
  const std::string why = variant == QrVariant::torch
                              ? ", a single matrix: PyTorch's own op is faster on this GPU"
                              : " by block reflectors of up to " + std::to_string(BlockReflectors::width_of(count));
  Explanation e{name_of(variant), std::to_string(count) + " reflectors on " + times(c.rows, c.columns) + why, {}};
  if (variant != QrVariant::blocked) return e;
  const uint32_t rows = grid_side(s.rows), batch = grid_side(s.batch), columns = grid_side(left ? c.columns : c.rows);
  e.steps = BlockReflectors::factor_steps(rows, batch, count, tuning);
  for (const Step& step : BlockReflectors::apply_steps(rows, batch, count, columns, tuning)) e.steps.push_back(step);
  return e;
}

const ExplainOp explaining_geqrf("geqrf", explain_geqrf);
const ExplainOp explaining_householder_product("householder_product", explain_householder_product);
const ExplainOp explaining_ormqr("ormqr", explain_ormqr);

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("geqrf(Tensor A) -> (Tensor, Tensor)");
  m.def("householder_product(Tensor A, Tensor tau) -> Tensor");
  m.def("ormqr(Tensor input, Tensor tau, Tensor other, bool left, bool transpose) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl("geqrf", TORCH_BOX(&metalcore::geqrf));
  m.impl("householder_product", TORCH_BOX(&metalcore::householder_product));
  m.impl("ormqr", TORCH_BOX(&metalcore::ormqr));
}

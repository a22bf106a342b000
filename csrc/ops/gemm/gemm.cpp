// matmul(a, b, …) = activation(alpha a b + bias + beta residual) for batches of matrices, and grouped_gemm(a, b, ends).
#include "gemm.h"

#include "../../gpu/cost.h"
#include "../../gpu/tuning.h"
#include "../common/common.h"
#include "../linalg/matrices.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace metalcore {
namespace {

const gpu::Table<GemmTuning> gemm_tuning("gemm",
                                         {{"few_rows", &GemmTuning::few_rows, {1, 32}},
                                          {"large_tiles", &GemmTuning::large_tiles, {1, 1 << 20}},
                                          {"short_steps", &GemmTuning::short_steps},
                                          {"units", &GemmTuning::units},
                                          {"unit_threadgroups", &GemmTuning::unit_threadgroups, {1, 1 << 16}},
                                          {"wide_tiles", &GemmTuning::wide_tiles, {1, 1 << 20}}},
                                         {{.family = "baseline"},
                                          {.family = "apple7", .short_steps = true},
                                          {.family = "apple8", .short_steps = true},
                                          {.family = "apple9", .short_steps = true},
                                          {.family = "apple10", .short_steps = true},
                                          {.family = "hopper", .large_tiles = 64, .units = true, .wide_tiles = 72},
                                          {.family = "simulator", .large_tiles = 64}});

GemmMatrix matrix_of(const Tensor& tensor) {
  const int64_t dims = tensor.dim();
  return {tensor.stride(dims - 2), tensor.stride(dims - 1), begins_aligned(tensor)};
}

// The distance along a dimension of the batch, counted from the back, where 0 is the columns.
int64_t batch_stride(const Tensor& tensor, int64_t back) {
  const int64_t d = tensor.dim() - 1 - back;
  return d < 0 || tensor.size(d) == 1 ? 0 : tensor.stride(d);
}

// Records a plan whose params have everything except the numbers of the epilogue.
void record_gemm(const char* op, GemmPlan plan, const GemmOperands& operands, const Tensor& result) {
  gpu::note_plan(op, plan.variant, [&] { return why_gemm(plan); });
  const bool tiled = is_tiled(plan);
  const GemmParams& p = plan.params;
  const double results =
      p.walkers == 0 ? static_cast<double>(plan.tile_rows) * p.columns
                     : static_cast<double>(plan.tile_rows) * plan.tile_columns * plan.across * p.walk_tiles / p.walkers;
  const double flops = 2.0 * results * std::max(p.terms, 1u);
  MaybeTensor parts;
  if (plan.splits > 1 && p.together == 1)
    parts = new_tensor({{plan.splits, p.rows, p.columns}}, ScalarType::Float, result);
  gpu::record(result, [&](gpu::Recording& recording) {
    gpu::in_pieces(recording, plan.tiles, {flops, 0}, [&](const gpu::Piece& piece) {
      plan.params.first = static_cast<uint32_t>(piece.first);
      recording.kernel(plan.variant, "_", suffix(result.scalar_type()));
      recording.buffer(plan.transposed, operands.a).buffer(!plan.transposed, operands.b);
      recording.buffer(2, operands.bias).buffer(3, operands.residual);
      if (tiled) recording.buffer(4, operands.ends);
      recording.buffer(tiled ? 5 : 4, parts ? *parts : result).bytes(tiled ? 6 : 5, p).work(piece.work.flops);
      recording.together(p.together)
          .dispatch_threadgroups({plan.across, grid_side(piece.count * p.together), plan.splits / p.together},
                                 {plan.threads});
    });
    if (!parts) return;
    recording.kernel("gemm_unit_sum_", suffix(result.scalar_type())).buffer(0, *parts).buffer(2, operands.bias);
    recording.buffer(3, operands.residual).buffer(5, result).bytes(6, p);
    recording.dispatch_threads({ceil_div<uint32_t>(p.rows * p.columns, GEMM_UNIT_SUMS)}, {GEMM_UNIT_SUMS_THREADS});
  });
}

void check_operands(const char* op, const Tensor& a, const Tensor& b) {
  check_float(op, "a", a);
  check_same_dtype(op, "b", b, a);
  check_same_device(op, "b", b, a);
}

GemmTuning tuning_for(const Tensor& like) {
  GemmTuning tuning = gemm_tuning(like);
  tuning.units = tuning.units && gpu::multiplies_tensors(like);
  if (tuning.units) tuning.most_together = gpu::most_together(like);
  return tuning;
}

Tensor matmul(const Tensor& a, const Tensor& b, const MaybeTensor& bias_, const MaybeTensor& residual_,
              const std::string& activation, double alpha, double beta) {
  const char* const op = "matmul";
  check_operands(op, a, b);
  check(a.dim() >= 2 && b.dim() >= 2 && a.size(-1) == b.size(-2), "metalcore::", op, ": a of shape ", shape_text(a),
        " does not go with b of shape ", shape_text(b));
  std::vector<int64_t> sizes = broadcast_batches(sizes_of(a), sizes_of(b));
  const size_t batch_dims = sizes.size();
  check(batch_dims <= GEMM_BATCH_DIMS, "metalcore::", op, ": a batch of ", batch_dims,
        " dimensions is more than kernels take");
  sizes.push_back(a.size(-2)), sizes.push_back(b.size(-1));
  if (bias_) {
    check_same_dtype(op, "bias", *bias_, a);
    check_same_device(op, "bias", *bias_, a);
    check(bias_->dim() == 1 && bias_->size(0) == b.size(-1), "metalcore::", op, ": bias must have shape [", b.size(-1),
          "], not ", shape_text(*bias_));
  }
  const Tensor result = new_tensor({sizes.data(), sizes.size()}, a.scalar_type(), a);
  if (residual_) {
    check_same_dtype(op, "residual", *residual_, a);
    check_same_device(op, "residual", *residual_, a);
    check_same_shape(op, "residual", *residual_, result);
  }
  const uint32_t number = activation_number(op, activation);
  const MaybeTensor bias = bias_ ? MaybeTensor(as_contiguous(*bias_)) : std::nullopt;
  // As in BLAS, what is multiplied by 0 is not read.
  matmul_into(result, a, b, bias, beta == 0 ? std::nullopt : residual_, number, alpha, beta);
  return result;
}

}  // namespace

int64_t unit_threadgroups(const Tensor& like) {
  const GemmTuning tuning = tuning_for(like);
  return like.element_size() == 2 && tuning.units ? int64_t{tuning.unit_threadgroups} : 0;
}

int64_t units_together(int64_t tiles, int64_t splits, const Tensor& like) {
  return units_together(tiles, splits, tuning_for(like));
}

bool units_take(const GemmProblem& problem, const Tensor& like) {
  return gemm_takes_units(problem, like.element_size(), tuning_for(like));
}

void gemm_into(const char* op, const GemmProblem& problem, const GemmOperands& operands, uint32_t activation,
               double alpha, double beta, const Tensor& result) {
  check(gemm_countable(problem), "metalcore::", op, ": ", problem.rows, "x", problem.terms, " times ", problem.terms,
        "x", problem.columns, " is more than kernels can count");
  GemmPlan plan = plan_gemm(problem, result.element_size(), tuning_for(result));
  plan.params.activation = activation;
  plan.params.alpha = static_cast<float>(alpha), plan.params.beta = static_cast<float>(beta);
  record_gemm(op, plan, operands, result);
}

bool begins_aligned(const Tensor& tensor) {
  const gpu::BufferView view = gpu::view_of(tensor);
  return (reinterpret_cast<uintptr_t>(view.storage) + view.offset) % 16 == 0;
}

uint32_t activation_number(const char* op, const std::string& name) {
  if (name == "none") return 0;
  if (name == "relu") return GEMM_RELU;
  if (name == "gelu") return GEMM_GELU;
  if (name == "gelu_tanh") return GEMM_GELU_TANH;
  if (name == "silu") return GEMM_SILU;
  check(false, "metalcore::", op, ": activation must be 'none', 'relu', 'gelu', 'gelu_tanh' or 'silu', not '", name,
        "'");
  return 0;
}

void matmul_into(const Tensor& result, const Tensor& a, const Tensor& b, const MaybeTensor& bias,
                 const MaybeTensor& residual, uint32_t activation, double alpha, double beta) {
  const char* const op = "matmul";
  if (result.numel() == 0) return;
  const auto sizes = result.sizes();
  const size_t batch_dims = sizes.size() - 2;

  GemmProblem problem{.rows = a.size(-2), .columns = b.size(-1), .terms = a.size(-1)};
  problem.has_bias = bias.has_value(), problem.has_residual = residual.has_value();
  problem.a = matrix_of(a), problem.b = matrix_of(b);
  if (residual) problem.residual = matrix_of(*residual);
  for (size_t d = 0; d < batch_dims; ++d) {
    const auto back = static_cast<int64_t>(batch_dims + 1 - d);
    const int64_t added = residual ? batch_stride(*residual, back) : 0;
    problem.batch.push_back({sizes[d], batch_stride(a, back), batch_stride(b, back), added});
  }
  gemm_into(op, problem, {a, b, bias, residual, std::nullopt}, activation, alpha, beta, result);
}

namespace {

// a of rows by terms. For b of groups by terms by columns, `ends` are those of the groups' rows; for b of terms by
// columns they are those of the groups' terms.
Tensor grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& ends_) {
  const char* const op = "grouped_gemm";
  check_operands(op, a, b);
  check_same_device(op, "offsets", ends_, a);
  check(ends_.scalar_type() == ScalarType::Int && ends_.dim() == 1, "metalcore::", op,
        ": offsets must be int32 with 1 dimension");
  const bool rows = b.dim() == 3;
  check(a.dim() == 2 && (rows || b.dim() == 2) && a.size(1) == b.size(-2), "metalcore::", op, ": a of shape ",
        shape_text(a), " does not go with b of shape ", shape_text(b));
  check(!rows || b.size(0) == ends_.size(0), "metalcore::", op, ": offsets must have ", b.size(0), " elements, not ",
        ends_.size(0));
  const int64_t groups = ends_.size(0), columns = b.size(-1);
  const Tensor result = rows ? new_tensor({{a.size(0), columns}}, a.scalar_type(), a)
                             : new_tensor({{groups, a.size(0), columns}}, a.scalar_type(), a);
  grouped_gemm_into(result, a, b, as_contiguous(ends_));
  return result;
}

}  // namespace

void grouped_gemm_into(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor& ends) {
  const char* const op = "grouped_gemm";
  if (result.numel() == 0) return;
  const bool rows = b.dim() == 3;
  const GemmProblem problem{
      .rows = a.size(0),
      .columns = b.size(-1),
      .terms = a.size(1),
      .a = matrix_of(a),
      .b = matrix_of(b),
      .grouped = rows ? GEMM_GROUPED_ROWS : GEMM_GROUPED_TERMS,
      .groups = grid_side(ends.size(0)),
      .b_group = rows ? b.stride(0) : 0,
  };
  gemm_into(op, problem, {a, b, std::nullopt, std::nullopt, ends}, 0, 1.0, 0.0, result);
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "matmul(Tensor a, Tensor b, Tensor? bias, Tensor? residual, str activation, float alpha, float beta) -> Tensor");
  m.def("grouped_gemm(Tensor a, Tensor b, Tensor offsets) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::matmul>("matmul");
  m.impl<&metalcore::grouped_gemm>("grouped_gemm");
}

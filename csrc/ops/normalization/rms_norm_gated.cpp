// rms_norm_gated: groups of the last dimension are normalized, and a gate multiplies the result or what is normalized.
#include "norms.h"

#include "../../../kernels/normalization/normalization.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

struct GatedRows {
  MaybeTensor weight;  // of the rows' dtype or of float32
  NestedRows x, gate, grad;
  RmsNormGatedParams params;
  bool aligned;
};

// A variant of the kernels: a team of up to so many threads has up to so many elements of a group each.
struct Variant {
  const char* name;
  int64_t threads;
  int64_t elements;
};
constexpr Variant kAligned[] = {{"simd1_aligned", 32, 4}, {"simd4_aligned", 32, 16}, {"block4_aligned", 512, 16}};
constexpr Variant kLooped = {"looped", 512, 8};  // at a time

const Variant& variant_of(const GatedRows& rows) {
  for (const Variant& variant : kAligned)
    if (rows.aligned && rows.params.length <= variant.threads * variant.elements) return variant;
  return kLooped;
}

// About so many threads make parts of the weight's gradient.
constexpr int64_t kPartThreads = int64_t{1} << 18;

bool is_silu(const char* op, const std::string& activation) {
  check(activation == "silu" || activation == "sigmoid", "metalcore::", op,
        ": activation must be 'silu' or 'sigmoid', not '", activation, "'");
  return activation == "silu";
}

GatedRows rows_of(const char* op, const Tensor& x, const Tensor& gate, const MaybeTensor& grad,
                  const MaybeTensor& weight, double eps, int64_t length, bool gate_first,
                  const std::string& activation) {
  check_float(op, "x", x);
  check_like(op, "gate", gate, x);
  if (grad) check_like(op, "grad", *grad, x);
  const NormShape shape = norm_shape(op, x.sizes(), 1);
  check(length > 0 && shape.length % length == 0, "metalcore::", op, ": group_size must divide the last dimension, ",
        shape.length, ", and is ", length);
  const bool silu = is_silu(op, activation);
  const NestedRows rows = nested_rows_of(x, shape.length), gates = nested_rows_of(gate, shape.length);
  const NestedRows grads = grad ? nested_rows_of(*grad, shape.length) : rows;
  const MaybeTensor parameter = kernel_weight(op, weight, x, shape);
  return {
      parameter,
      rows,
      gates,
      grads,
      {
          .length = grid_side(length),
          .groups = grid_side(shape.length / length),
          .rows = grid_side(shape.rows),
          .eps = static_cast<float>(eps),
          .has_weight = parameter.has_value(),
          .gate_first = gate_first,
          .silu = silu,
          .chunk_rows = grid_side(std::max<int64_t>(32, ceil_div(shape.rows * shape.length, kPartThreads))),
          .x = rows.strides,
          .gate = gates.strides,
          .grad = grads.strides,
      },
      all_aligned16({&rows, &gates, &grads}, {&parameter}, length),
  };
}

void record_rows(gpu::Recording& recording, const char* op, const GatedRows& rows, ScalarType dtype) {
  const Variant& variant = variant_of(rows);
  gpu::note_plan(op, variant.name, [&] {
    return "up to " + std::to_string(variant.threads) + " threads have a group of " +
           std::to_string(rows.params.length);
  });
  const ScalarType weight = rows.weight ? rows.weight->scalar_type() : dtype;
  recording.kernel(op, "_", variant.name, "_", suffix(dtype), dtype == weight ? "" : "_float");
}

void dispatch_rows(gpu::Recording& recording, const GatedRows& rows) {
  const int64_t length = rows.params.length, teams = int64_t{rows.params.rows} * rows.params.groups;
  const Variant& variant = variant_of(rows);
  if (variant.threads == gpu::kSimdWidth) {
    constexpr int64_t kTeams = 4;
    recording.dispatch_threadgroups({grid_side(ceil_div(teams, kTeams))}, {kTeams * gpu::kSimdWidth});
  } else {
    const int64_t threads = round_up<int64_t>(ceil_div(length, variant.elements), gpu::kSimdWidth);
    recording.dispatch_threadgroups({grid_side(teams)}, {static_cast<uint32_t>(std::min(threads, variant.threads))});
  }
}

Tensor rms_norm_gated(const Tensor& x, const Tensor& gate, const MaybeTensor& weight, double eps, int64_t group_size,
                      bool gate_first, const std::string& activation) {
  const char* op = "rms_norm_gated";
  const GatedRows rows = rows_of(op, x, gate, std::nullopt, weight, eps, group_size, gate_first, activation);
  const Tensor y = new_like(x);
  if (x.numel() == 0) return y;
  gpu::record(y, [&](gpu::Recording& recording) {
    record_rows(recording, op, rows, x.scalar_type());
    recording.buffer(0, rows.x.tensor).buffer(1, rows.gate.tensor).buffer(2, rows.weight).buffer(3, y);
    recording.bytes(4, rows.params);
    dispatch_rows(recording, rows);
  });
  return y;
}

// The gradients of x, of the gate and of the weight (empty if it is not wanted).
std::tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward(const Tensor& grad, const Tensor& x, const Tensor& gate,
                                                           const MaybeTensor& weight, double eps, int64_t group_size,
                                                           bool gate_first, const std::string& activation,
                                                           bool weight_wanted) {
  const char* op = "rms_norm_gated_backward";
  check(!weight_wanted || weight, "metalcore::", op, ": there is no weight to differentiate by");
  const GatedRows rows = rows_of(op, x, gate, grad, weight, eps, group_size, gate_first, activation);
  const RmsNormGatedParams& params = rows.params;
  const Tensor gx = new_like(x), ggate = new_like(x);
  const int64_t none[1] = {0};
  Tensor gw = weight_wanted ? new_like(*weight) : new_tensor(Sizes(none, 1), x.scalar_type(), x);
  if (x.numel() == 0) {
    if (weight_wanted) torch::stable::zero_(gw);
    return {gx, ggate, gw};
  }
  const int64_t width = int64_t{params.length} * params.groups;
  const int64_t chunks = ceil_div(params.rows, params.chunk_rows);
  const Tensor scales = new_tensor({int64_t{params.rows} * params.groups}, ScalarType::Float, x);
  const MaybeTensor partial =
      weight_wanted ? MaybeTensor(new_tensor({chunks, width}, ScalarType::Float, x)) : std::nullopt;
  gpu::record(gx, [&](gpu::Recording& recording) {
    record_rows(recording, op, rows, x.scalar_type());
    recording.buffer(0, rows.grad.tensor).buffer(1, rows.x.tensor).buffer(2, rows.gate.tensor).buffer(3, rows.weight);
    recording.buffer(4, gx).buffer(5, ggate).buffer(6, scales).bytes(7, params);
    dispatch_rows(recording, rows);
    if (!weight_wanted) return;
    recording.kernel("rms_norm_gated_weight_partial_", suffix(x.scalar_type()));
    recording.buffer(0, rows.grad.tensor).buffer(1, rows.x.tensor).buffer(2, rows.gate.tensor).buffer(3, scales);
    recording.buffer(4, partial).bytes(5, params);
    recording.dispatch_threads({grid_side(width), grid_side(chunks)}, {256});
    record_column_sums(recording, *partial, chunks, gw);
  });
  return {gx, ggate, gw};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "rms_norm_gated(Tensor x, Tensor gate, Tensor? weight, float eps, int group_size, bool gate_first, "
      "str activation) -> Tensor");
  m.def(
      "rms_norm_gated_backward(Tensor grad, Tensor x, Tensor gate, Tensor? weight, float eps, int group_size, "
      "bool gate_first, str activation, bool weight_wanted) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::rms_norm_gated>("rms_norm_gated");
  m.impl<&metalcore::rms_norm_gated_backward>("rms_norm_gated_backward");
}

// quant_matvec(x, packed, type): x Wᵀ for few rows of x and packed weights W; quant_matvec_experts the same where each
// row of the result has a matrix of its own.
#include "formats.h"

#include "../../../kernels/quant/quant.h"
#include "../../gpu/tuning.h"

#include <algorithm>
#include <string>
#include <vector>

namespace metalcore {
namespace {

struct QuantTuning {
  const char* family;
  uint32_t mv_threadgroups = 512;  // about so many are wanted: with fewer, each has more rows of weights
};
const gpu::Table<QuantTuning> quant_tuning("quant",
                                           {{"mv_threadgroups", &QuantTuning::mv_threadgroups, {64, 4096, 64}}},
                                           {{.family = "baseline"}, {.family = "hopper", .mv_threadgroups = 1024}});

struct MvPlan {
  uint32_t x_rows;  // of a threadgroup: 1 or 4, as in the kernels' names
  uint32_t simdgroups, group_rows;
};

MvPlan plan_mv(int64_t rows, int64_t length, int64_t x_rows, bool experts, const Tensor& on) {
  const bool one = x_rows == 1 || experts;
  const int64_t chunks = ceil_div<int64_t>(length, QUANT_CHUNK);
  const int64_t most = one ? QUANT_MV1_SIMDGROUPS : QUANT_MV4_SIMDGROUPS, each = ceil_div(chunks, most);
  const int64_t step = one ? QUANT_MV1_STEP : QUANT_MV4_STEP, wide = one ? 1 : 4;
  const int64_t x_groups = ceil_div(x_rows, wide);
  const int64_t wanted = ceil_div<int64_t>(rows * x_groups, quant_tuning(on).mv_threadgroups);
  const int64_t group_rows = std::clamp<int64_t>(round_up(wanted, step), step, QUANT_MV_RESULTS / wide);
  return {static_cast<uint32_t>(wide), static_cast<uint32_t>(ceil_div(chunks, each)),
          static_cast<uint32_t>(group_rows)};
}

// `result` has `x_rows` rows. `chosen` are the experts of its rows, or nullptr.
void multiply(const char* op, const Tensor& x, const PackedRows& weights, const QuantFormat& format,
              const Tensor* chosen, int64_t x_rows, int64_t shared, const Tensor& result) {
  const MvPlan plan = plan_mv(weights.rows, weights.length, x_rows, chosen != nullptr, x);
  const std::string variant = "mul_mv" + std::to_string(plan.x_rows);
  gpu::note_plan(op, variant.c_str(), [&] {
    return std::to_string(x_rows) + " rows of x: " + std::to_string(plan.simdgroups) + " simdgroups share a row of " +
           format.name + ", and a threadgroup has " + std::to_string(plan.group_rows) + " rows";
  });
  if (result.numel() == 0) return;
  const Tensor input = from_multiple_of_16(x);
  const QuantMvParams params{
      .row_bytes = static_cast<uint64_t>(weights.row_bytes),
      .expert_bytes = static_cast<uint64_t>(weights.row_bytes * weights.rows),
      .weights = grid_side(weights.rows),
      .slices = grid_side(weights.length / QUANT_SLICE),
      .x_rows = grid_side(x_rows),
      .shared = grid_side(shared),
      .experts = chosen ? grid_side(weights.matrices) : 0u,
      .group_rows = plan.group_rows,
      .dtype = quant_dtype(x.scalar_type()),
  };
  const int64_t groups = ceil_div<int64_t>(weights.rows, plan.group_rows) * ceil_div<int64_t>(x_rows, plan.x_rows);
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel("quant_mv", plan.x_rows == 1 ? "1_" : "4_", format.name).buffer(0, weights.tensor);
    recording.buffer(1, input).buffer(2, result).buffer(3, result).buffer(4, chosen ? *chosen : input);
    recording.bytes(5, params).work(2.0 * static_cast<double>(result.numel() * weights.length),
                                    static_cast<double>(weights.rows * weights.row_bytes * (chosen ? x_rows : 1)));
    recording.dispatch_threadgroups({grid_side(groups)}, {32 * plan.simdgroups});
  });
}

// The sizes of x with another last one.
Tensor result_like(const Tensor& x, int64_t last) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = last;
  return new_tensor({sizes.data(), sizes.size()}, x.scalar_type(), x);
}

void check_x(const char* op, const Tensor& x, const Tensor& packed, const PackedRows& weights) {
  check_float(op, "x", x);
  check_same_device(op, "packed", packed, x);
  check(x.dim() >= 1 && x.size(-1) == weights.length, "metalcore::", op, ": x of shape ", shape_text(x),
        " does not go with rows of ", weights.length, " weights");
}

Tensor quant_matvec(const Tensor& x, const Tensor& packed, int64_t type) {
  const QuantFormat& format = quant_format("quant_matvec", type);
  const PackedRows weights = packed_rows("quant_matvec", packed, format, 2);
  check_x("quant_matvec", x, packed, weights);
  const Tensor result = result_like(x, weights.rows);
  const int64_t rows = weights.rows ? result.numel() / weights.rows : 0;
  multiply("quant_matvec", x, weights, format, nullptr, rows, 1, result);
  return result;
}

Tensor quant_matvec_experts(const Tensor& x, const Tensor& packed, const Tensor& experts, int64_t type) {
  const char* const op = "quant_matvec_experts";
  const QuantFormat& format = quant_format(op, type);
  const PackedRows weights = packed_rows(op, packed, format, 3);
  check_x(op, x, packed, weights);
  check_same_device(op, "experts", experts, x);
  check(experts.scalar_type() == ScalarType::Int && experts.dim() == 2, "metalcore::", op,
        ": experts must be int32 with 2 dimensions");
  const int64_t tokens = experts.size(0), each = experts.size(1);
  const bool own = x.dim() == 3;
  check((own || x.dim() == 2) && x.size(0) == tokens && (!own || x.size(1) == each), "metalcore::", op, ": x of shape ",
        shape_text(x), " does not go with experts of shape ", shape_text(experts));
  const Tensor result = new_tensor({{tokens, each, weights.rows}}, x.scalar_type(), x);
  const Tensor chosen = as_contiguous(experts);
  multiply(op, x, weights, format, &chosen, tokens * each, own ? 1 : each, result);
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("quant_matvec(Tensor x, Tensor packed, int type) -> Tensor");
  m.def("quant_matvec_experts(Tensor x, Tensor packed, Tensor experts, int type) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::quant_matvec>("quant_matvec");
  m.impl<&metalcore::quant_matvec_experts>("quant_matvec_experts");
}

// Weights of 2 to 8 bits in groups with scales and offsets, or zero points. affine_rows makes numbers of them, and
// affine_matmul multiplies with them: x Wᵀ, or with `transposed` x W, which is the gradient by x; affine_matmul_experts
// with a matrix of its own for each row of the result.
#include "../../../kernels/quant/affine.h"

#include "../../../kernels/quant/quant.h"
#include "formats.h"
#include "mul_mv.h"
#include "rows.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

namespace metalcore {
namespace {

struct AffineWeights {
  Tensor packed, scales, offsets;
  int64_t bits, matrices, rows, length;
  AffineParams params;

  std::string kernel() const { return "Affine" + std::to_string(bits); }
  std::string format() const { return std::to_string(bits) + " bits"; }
  int64_t slices() const { return length / QUANT_SLICE; }
  double bytes(int64_t of_rows) const {
    return static_cast<double>(of_rows * (packed.size(-1) + scales.size(-1) * 2 * scales.element_size()));
  }
  uint32_t bind(gpu::Recording& recording) const {
    recording.buffer(0, packed).buffer(1, scales).buffer(2, scales);
    recording.buffer(3, offsets).buffer(4, offsets).buffer(5, offsets).bytes(6, params);
    return 7;
  }
};

// `dims` is 3 where there are several matrices.
AffineWeights affine_weights(const char* op, const Tensor& packed, const Tensor& scales, const Tensor& offsets,
                             int64_t bits, int64_t dims) {
  check(bits >= 2 && bits <= 8 && bits != 7, "metalcore::", op, ": bits must be 2, 3, 4, 5, 6 or 8, not ", bits);
  const bool is_signed = packed.scalar_type() == ScalarType::Char;
  check((is_signed || packed.scalar_type() == ScalarType::Byte) && packed.dim() == dims, "metalcore::", op,
        ": packed must be uint8 or int8 with ", dims, " dimensions, not ", dtype_name(packed.scalar_type()),
        " of shape ", shape_text(packed));
  check(!is_signed || std::has_single_bit(static_cast<uint64_t>(bits)), "metalcore::", op,
        ": packed is int8, and signed weights must have 2, 4 or 8 bits, not ", bits);
  const int64_t matrices = dims == 3 ? packed.size(0) : 1, rows = packed.size(-2);
  const int64_t slice_bytes = QUANT_SLICE / 8 * bits;
  check(packed.size(-1) % slice_bytes == 0, "metalcore::", op, ": rows of ", packed.size(-1),
        " bytes are not 32 weights of ", bits, " bits, which have ", slice_bytes);
  const int64_t length = packed.size(-1) / slice_bytes * QUANT_SLICE;
  check_float(op, "scales", scales);
  const uint32_t zeros = offsets.scalar_type() == ScalarType::Byte   ? AFFINE_ZEROS
                         : offsets.scalar_type() == ScalarType::Char ? AFFINE_SIGNED_ZEROS
                                                                     : AFFINE_OFFSETS;
  check(zeros != AFFINE_OFFSETS || offsets.scalar_type() == scales.scalar_type(), "metalcore::", op,
        ": offsets must have the scales' dtype, or be zero points of uint8 or int8, not ",
        dtype_name(offsets.scalar_type()));
  const bool shaped = scales.dim() == dims && scales.size(-2) == rows && (dims == 2 || scales.size(0) == matrices) &&
                      offsets.sizes().equals(scales.sizes());
  check(shaped, "metalcore::", op, ": scales and offsets must have shape (",
        dims == 3 ? std::to_string(matrices) + ", " : "", rows, ", groups), and are ", shape_text(scales), " and ",
        shape_text(offsets));
  check_same_device(op, "scales", scales, packed);
  check_same_device(op, "offsets", offsets, packed);
  const int64_t groups = scales.size(-1), size = length == 0 ? QUANT_SLICE : groups == 0 ? 0 : length / groups;
  check(groups * size == length && size >= QUANT_SLICE && std::has_single_bit(static_cast<uint64_t>(size)),
        "metalcore::", op, ": ", groups, " groups of ", length,
        " weights must be of 32 weights, or of 64, 128 … any power of 2");
  return {.packed = from_multiple_of_16(packed),
          .scales = as_contiguous(scales),
          .offsets = as_contiguous(offsets),
          .bits = bits,
          .matrices = matrices,
          .rows = rows,
          .length = length,
          .params = {.shift = static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(size / QUANT_SLICE))),
                     .dtype = quant_dtype(scales.scalar_type()),
                     .zeros = zeros,
                     .is_signed = is_signed ? 1u : 0u}};
}

Tensor numbers_of(const char* op, const AffineWeights& weights, const MaybeTensor& rows, ScalarType dtype) {
  const RowsReader reader{.kernel = "affine_rows_" + weights.kernel(),
                          .format = weights.format(),
                          .packed = weights.packed,
                          .rows = weights.rows,
                          .length = weights.length,
                          .row_bytes = static_cast<uint64_t>(weights.slices()),  // rows are counted in slices
                          .bind = [&](gpu::Recording& recording) { return weights.bind(recording); },
                          .bytes = [&](int64_t count) { return weights.bytes(count); }};
  return rows_as_numbers(op, reader, rows, dtype);
}

Tensor affine_rows(const Tensor& packed, const Tensor& scales, const Tensor& offsets, const MaybeTensor& rows,
                   int64_t bits, ScalarType dtype) {
  const char* const op = "affine_rows";
  const AffineWeights weights = affine_weights(op, packed, scales, offsets, bits, 2);
  check_rows(op, rows, dtype, packed);
  return numbers_of(op, weights, rows, dtype);
}

// `result` has `x_rows` rows. `chosen` are the experts of its rows, or nullptr.
void mul_mv(const char* op, const Tensor& x, const AffineWeights& weights, const Tensor* chosen, int64_t x_rows,
            int64_t shared, const Tensor& result) {
  const MvPlan plan = plan_mv(weights.rows, weights.length, x_rows, chosen != nullptr, x);
  plan.note(op, x_rows, weights.format());
  if (result.numel() == 0) return;
  const Tensor input = from_multiple_of_16(x);
  const int64_t groups = plan.threadgroups(weights.rows, x_rows);
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel(plan.kernel(weights.kernel()));
    weights.bind(recording);
    recording.buffer(7, input).buffer(8, result).buffer(9, result);
    recording.buffer(10, chosen ? MaybeTensor(*chosen) : std::nullopt);
    recording.bytes(11,
                    QuantMvParams{.row_bytes = static_cast<uint64_t>(weights.slices()),  // counted in slices
                                  .expert_bytes = static_cast<uint64_t>(weights.rows * weights.slices()),
                                  .weights = grid_side(weights.rows),
                                  .slices = grid_side(weights.slices()),
                                  .x_rows = grid_side(x_rows),
                                  .shared = grid_side(shared),
                                  .experts = chosen ? grid_side(weights.matrices) : 0u,
                                  .group_rows = plan.group_rows,
                                  .dtype = quant_dtype(x.scalar_type())});
    recording.work(2.0 * static_cast<double>(x_rows * weights.rows * weights.length),
                   weights.bytes(weights.rows * (chosen ? x_rows : 1)));
    recording.dispatch_threadgroups({grid_side(groups)}, {32 * plan.simdgroups});
  });
}

Tensor affine_matmul(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& offsets, int64_t bits,
                     bool transposed) {
  const char* const op = "affine_matmul";
  const AffineWeights weights = affine_weights(op, packed, scales, offsets, bits, 2);
  const int64_t x_rows = check_x(op, x, packed, weights.rows, weights.length, transposed);
  if (transposed || x_rows > most_mv_rows(x) || weights.length == 0)
    return multiply_numbers(op, x, x_rows, transposed,
                            [&] { return numbers_of(op, weights, std::nullopt, x.scalar_type()); });
  const Tensor result = result_like(x, weights.rows);
  mul_mv(op, x, weights, nullptr, x_rows, 1, result);
  return result;
}

Tensor affine_matmul_experts(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& offsets,
                             const Tensor& experts, int64_t bits) {
  const char* const op = "affine_matmul_experts";
  const AffineWeights weights = affine_weights(op, packed, scales, offsets, bits, 3);
  check_x(op, x, packed, weights.rows, weights.length, false);
  const ChosenExperts chosen = check_experts(op, x, experts);
  const Tensor result = new_tensor({{chosen.tokens, chosen.each, weights.rows}}, x.scalar_type(), x);
  check((weights.matrices > 0 && weights.length > 0) || result.numel() == 0, "metalcore::", op,
        ": packed has no weights");
  mul_mv(op, x, weights, &chosen.experts, chosen.results(), chosen.shared, result);
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "affine_rows(Tensor packed, Tensor scales, Tensor offsets, Tensor? rows, int bits, ScalarType dtype) -> Tensor");
  m.def("affine_matmul(Tensor x, Tensor packed, Tensor scales, Tensor offsets, int bits, bool transposed) -> Tensor");
  m.def(
      "affine_matmul_experts(Tensor x, Tensor packed, Tensor scales, Tensor offsets, Tensor experts, int bits) -> "
      "Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::affine_rows>("affine_rows");
  m.impl<&metalcore::affine_matmul>("affine_matmul");
  m.impl<&metalcore::affine_matmul_experts>("affine_matmul_experts");
}

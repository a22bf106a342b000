// Weights of 2 to 8 bits in groups with scales and offsets, or zero points. affine_rows makes numbers of them, and
// affine_matmul multiplies with them: x Wᵀ, or with `transposed` x W, which is the gradient by x.
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
  int64_t bits, rows, length;
  AffineParams params;

  std::string kernel() const { return "Affine" + std::to_string(bits); }
  std::string format() const { return std::to_string(bits) + " bits"; }
  int64_t slices() const { return length / QUANT_SLICE; }
  double bytes(int64_t of_rows) const {
    return static_cast<double>(of_rows * (packed.size(1) + scales.size(1) * 2 * scales.element_size()));
  }
  uint32_t bind(gpu::Recording& recording) const {
    recording.buffer(0, packed).buffer(1, scales).buffer(2, scales);
    recording.buffer(3, offsets).buffer(4, offsets).buffer(5, offsets).bytes(6, params);
    return 7;
  }
};

AffineWeights affine_weights(const char* op, const Tensor& packed, const Tensor& scales, const Tensor& offsets,
                             int64_t bits) {
  check(bits >= 2 && bits <= 8 && bits != 7, "metalcore::", op, ": bits must be 2, 3, 4, 5, 6 or 8, not ", bits);
  const bool is_signed = packed.scalar_type() == ScalarType::Char;
  check((is_signed || packed.scalar_type() == ScalarType::Byte) && packed.dim() == 2, "metalcore::", op,
        ": packed must be uint8 or int8 with 2 dimensions, not ", dtype_name(packed.scalar_type()), " of shape ",
        shape_text(packed));
  check(!is_signed || std::has_single_bit(static_cast<uint64_t>(bits)), "metalcore::", op,
        ": packed is int8, and signed weights must have 2, 4 or 8 bits, not ", bits);
  const int64_t rows = packed.size(0), slice_bytes = QUANT_SLICE / 8 * bits;
  check(packed.size(1) % slice_bytes == 0, "metalcore::", op, ": rows of ", packed.size(1),
        " bytes are not 32 weights of ", bits, " bits, which have ", slice_bytes);
  const int64_t length = packed.size(1) / slice_bytes * QUANT_SLICE;
  check_float(op, "scales", scales);
  const uint32_t zeros = offsets.scalar_type() == ScalarType::Byte   ? AFFINE_ZEROS
                         : offsets.scalar_type() == ScalarType::Char ? AFFINE_SIGNED_ZEROS
                                                                     : AFFINE_OFFSETS;
  check(zeros != AFFINE_OFFSETS || offsets.scalar_type() == scales.scalar_type(), "metalcore::", op,
        ": offsets must have the scales' dtype, or be zero points of uint8 or int8, not ",
        dtype_name(offsets.scalar_type()));
  const bool shaped = scales.dim() == 2 && scales.size(0) == rows && offsets.dim() == 2 && offsets.size(0) == rows &&
                      offsets.size(1) == scales.size(1);
  check(shaped, "metalcore::", op, ": scales and offsets must have shape (", rows, ", groups), and are ",
        shape_text(scales), " and ", shape_text(offsets));
  check_same_device(op, "scales", scales, packed);
  check_same_device(op, "offsets", offsets, packed);
  const int64_t groups = scales.size(1), size = length == 0 ? QUANT_SLICE : groups == 0 ? 0 : length / groups;
  check(groups * size == length && size >= QUANT_SLICE && std::has_single_bit(static_cast<uint64_t>(size)),
        "metalcore::", op, ": ", groups, " groups of ", length,
        " weights must be of 32 weights, or of 64, 128 … any power of 2");
  return {.packed = from_multiple_of_16(packed),
          .scales = as_contiguous(scales),
          .offsets = as_contiguous(offsets),
          .bits = bits,
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
  const AffineWeights weights = affine_weights(op, packed, scales, offsets, bits);
  check_rows(op, rows, dtype, packed);
  return numbers_of(op, weights, rows, dtype);
}

Tensor affine_matmul(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& offsets, int64_t bits,
                     bool transposed) {
  const char* const op = "affine_matmul";
  const AffineWeights weights = affine_weights(op, packed, scales, offsets, bits);
  const int64_t x_rows = check_x(op, x, packed, weights.rows, weights.length, transposed);
  if (transposed || x_rows > most_mv_rows(x) || weights.length == 0)
    return multiply_numbers(op, x, x_rows, transposed,
                            [&] { return numbers_of(op, weights, std::nullopt, x.scalar_type()); });
  const Tensor result = result_like(x, weights.rows);
  const MvPlan plan = plan_mv(weights.rows, weights.length, x_rows, false, x);
  plan.note(op, x_rows, weights.format());
  if (result.numel() == 0) return result;
  const Tensor input = from_multiple_of_16(x);
  const int64_t groups = plan.threadgroups(weights.rows, x_rows);
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel(plan.kernel(weights.kernel()));
    weights.bind(recording);
    recording.buffer(7, input).buffer(8, result).buffer(9, result);
    recording.bytes(10, QuantMvParams{.row_bytes = static_cast<uint64_t>(weights.slices()),  // counted in slices
                                      .expert_bytes = 0,
                                      .weights = grid_side(weights.rows),
                                      .slices = grid_side(weights.slices()),
                                      .x_rows = grid_side(x_rows),
                                      .shared = 1,
                                      .experts = 0,
                                      .group_rows = plan.group_rows,
                                      .dtype = quant_dtype(x.scalar_type())});
    recording.work(2.0 * static_cast<double>(x_rows * weights.rows * weights.length), weights.bytes(weights.rows));
    recording.dispatch_threadgroups({grid_side(groups)}, {32 * plan.simdgroups});
  });
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "affine_rows(Tensor packed, Tensor scales, Tensor offsets, Tensor? rows, int bits, ScalarType dtype) -> Tensor");
  m.def("affine_matmul(Tensor x, Tensor packed, Tensor scales, Tensor offsets, int bits, bool transposed) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::affine_rows>("affine_rows");
  m.impl<&metalcore::affine_matmul>("affine_matmul");
}

// Weights of 2 to 8 bits in groups with scales and offsets, or zero points. affine_rows makes numbers of them, and
// affine_matmul multiplies with them: x Wᵀ, or with `transposed` x W, which is the gradient by x; affine_matmul_experts
// with a matrix of its own for each row of the result.
#include "../../../kernels/quant/affine.h"

#include "../../../kernels/quant/quant.h"
#include "formats.h"
#include "packed_products.h"
#include "rows.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

namespace metalcore {
namespace {

struct AffineWeights {
  static constexpr const char* rows_kernel = "affine_rows_";
  static constexpr bool takes_tiles = false;
  Tensor packed, scales, offsets;
  int64_t bits, matrices, rows, length;
  AffineParams params;

  std::string kernel() const { return "Affine" + std::to_string(bits); }
  std::string format() const { return std::to_string(bits) + " bits"; }
  // Rows are counted in slices.
  uint64_t row_bytes() const { return static_cast<uint64_t>(length / QUANT_SLICE); }
  uint64_t expert_bytes() const { return static_cast<uint64_t>(rows) * row_bytes(); }
  double bytes(int64_t of_rows) const {
    return static_cast<double>(of_rows * (packed.size(-1) + scales.size(-1) * 2 * scales.element_size()));
  }
  uint32_t bind(gpu::Recording& recording) const {
    recording.buffer(0, packed).buffer(1, scales).buffer(2, scales);
    recording.buffer(3, offsets).buffer(4, offsets).buffer(5, offsets).bytes(6, params);
    return 7;
  }
  uint32_t bind_sizes(gpu::Recording&, uint32_t at) const { return at; }
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

Tensor affine_rows(const Tensor& packed, const Tensor& scales, const Tensor& offsets, const MaybeTensor& rows,
                   int64_t bits, ScalarType dtype) {
  const char* const op = "affine_rows";
  const AffineWeights weights = affine_weights(op, packed, scales, offsets, bits, 2);
  check_rows(op, rows, dtype, packed);
  return numbers_of(op, weights, rows, dtype);
}

Tensor affine_matmul(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& offsets, int64_t bits,
                     bool transposed) {
  const char* const op = "affine_matmul";
  return multiply(op, x, affine_weights(op, packed, scales, offsets, bits, 2), transposed);
}

Tensor affine_matmul_experts(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& offsets,
                             const Tensor& experts, int64_t bits) {
  const char* const op = "affine_matmul_experts";
  return multiply_by_experts(op, x, affine_weights(op, packed, scales, offsets, bits, 3), experts);
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

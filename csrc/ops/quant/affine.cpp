// Weights of 2 to 8 bits in groups with scales and offsets, or zero points. affine_rows makes numbers of them, and
// affine_matmul multiplies with them: x Wᵀ, or with `transposed` x W, which is the gradient by x.
#include "../../../kernels/quant/affine.h"

#include "../../../kernels/quant/quant.h"
#include "formats.h"
#include "mul_mv.h"

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
  int64_t slices() const { return length / QUANT_SLICE; }
  double bytes(int64_t of_rows) const {
    return static_cast<double>(of_rows * (packed.size(1) + scales.size(1) * 2 * scales.element_size()));
  }
  void bind(gpu::Recording& recording) const {
    recording.buffer(0, packed).buffer(1, scales).buffer(2, scales);
    recording.buffer(3, offsets).buffer(4, offsets).buffer(5, offsets).bytes(6, params);
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
  std::vector<int64_t> sizes{weights.rows};
  if (rows) sizes.assign(rows->sizes().begin(), rows->sizes().end());
  sizes.push_back(weights.length);
  const Tensor result = new_tensor({sizes.data(), sizes.size()}, dtype, weights.packed);
  gpu::note_plan(op, "slices", [&] { return "a thread has 32 weights of " + std::to_string(weights.bits) + " bits"; });
  if (result.numel() == 0) return result;
  check(weights.rows > 0, "metalcore::", op, ": packed has no rows, and rows has indices");
  const Tensor indices = rows ? as_contiguous(*rows) : weights.packed;
  const int64_t count = result.numel() / weights.length, slices = weights.slices();
  const int64_t at_once = std::max<int64_t>(1, INT32_MAX / 8 / slices);  // the kernel counts fours in 32 bits
  gpu::record(result, [&](gpu::Recording& recording) {
    for (int64_t from = 0; from < count; from += at_once) {
      const int64_t part = std::min(at_once, count - from);
      recording.kernel("affine_rows_", weights.kernel());
      weights.bind(recording);
      recording.buffer(7, indices).buffer(8, result);
      recording.bytes(9, QuantRowsParams{.row_bytes = static_cast<uint64_t>(slices),  // rows are counted in slices
                                         .from = static_cast<uint64_t>(from),
                                         .count = grid_side(part * slices),
                                         .weights = grid_side(weights.rows),
                                         .slices = grid_side(slices),
                                         .gathered = rows ? 1u : 0u,
                                         .dtype = quant_dtype(dtype)});
      recording.work(static_cast<double>(part * weights.length),
                     weights.bytes(part) + static_cast<double>(part * weights.length * result.element_size()));
      recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(part * slices, QUANT_ROWS_THREADS))},
                                      {QUANT_ROWS_THREADS});
    }
  });
  return result;
}

Tensor affine_rows(const Tensor& packed, const Tensor& scales, const Tensor& offsets, const MaybeTensor& rows,
                   int64_t bits, ScalarType dtype) {
  const char* const op = "affine_rows";
  const AffineWeights weights = affine_weights(op, packed, scales, offsets, bits);
  check(is_float_dtype(dtype), "metalcore::", op, ": dtype must be float32, float16 or bfloat16");
  if (rows) {
    check(rows->scalar_type() == ScalarType::Long, "metalcore::", op, ": rows must be int64, not ",
          dtype_name(rows->scalar_type()));
    check_same_device(op, "rows", *rows, packed);
  }
  return numbers_of(op, weights, rows, dtype);
}

Tensor affine_matmul(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& offsets, int64_t bits,
                     bool transposed) {
  const char* const op = "affine_matmul";
  check_float(op, "x", x);
  check_same_device(op, "packed", packed, x);
  const AffineWeights weights = affine_weights(op, packed, scales, offsets, bits);
  check(x.dim() >= 1 && x.size(-1) == (transposed ? weights.rows : weights.length), "metalcore::", op, ": x of shape ",
        shape_text(x), " does not go with ", weights.rows, " rows of ", weights.length, " weights");
  int64_t x_rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) x_rows *= x.size(d);
  if (transposed || x_rows > most_mv_rows(x) || weights.length == 0) {
    const Tensor numbers = numbers_of(op, weights, std::nullopt, x.scalar_type());
    gpu::note_plan(op, "torch", [&] {
      return std::to_string(x_rows) + " rows of x: the weights become numbers, which PyTorch's matmul multiplies";
    });
    return torch::stable::matmul(x, transposed ? numbers : torch::stable::transpose(numbers, 0, 1));
  }
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = weights.rows;
  const Tensor result = new_tensor({sizes.data(), sizes.size()}, x.scalar_type(), x);
  const MvPlan plan = plan_mv(weights.rows, weights.length, x_rows, false, x);
  gpu::note_plan(op, ("mul_mv" + std::to_string(plan.x_rows)).c_str(), [&] {
    return std::to_string(x_rows) + " rows of x: " + std::to_string(plan.simdgroups) + " simdgroups share a row of " +
           std::to_string(bits) + " bits, and a threadgroup has " + std::to_string(plan.group_rows) + " rows";
  });
  if (result.numel() == 0) return result;
  const Tensor input = from_multiple_of_16(x);
  const int64_t groups = ceil_div<int64_t>(weights.rows, plan.group_rows) * ceil_div<int64_t>(x_rows, plan.x_rows);
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel("quant_mv", std::to_string(plan.x_rows), "_", weights.kernel());
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

// Numbers of 8 and 4 bits with scales on a grid. scaled_quantize packs them, scaled_rows makes numbers of them again,
// scaled_matmul multiplies with them: x Wᵀ, or with `transposed` x W, which is the gradient by x, and
// scaled_matmul_experts with a matrix of its own for each row of the result.
#include "../../../kernels/quant/scaled.h"

#include "../../../kernels/quant/quant.h"
#include "formats.h"
#include "packed_products.h"
#include "rows.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

namespace metalcore {
namespace {

struct ScaledFormat {
  const char *name, *kernel;
  int64_t bits;
  uint32_t kind;     // of scales
  int64_t of_scale;  // numbers of a row that share a scale, or 0 where the call says it
};
constexpr ScaledFormat kFormats[] = {
    {"e4m3", "E4M3", 8, SCALED_FLOAT, 0},  {"e5m2", "E5M2", 8, SCALED_FLOAT, 0},
    {"mxfp8", "E4M3", 8, SCALED_E8M0, 32}, {"mxfp8_e5m2", "E5M2", 8, SCALED_E8M0, 32},
    {"mxfp4", "E2M1", 4, SCALED_E8M0, 32}, {"nvfp4", "E2M1", 4, SCALED_E4M3, 16},
};

const ScaledFormat& scaled_format(const char* op, const std::string& name) {
  const auto* const found =
      std::find_if(std::begin(kFormats), std::end(kFormats), [&](const ScaledFormat& one) { return name == one.name; });
  check(found != std::end(kFormats), "metalcore::", op,
        ": format must be e4m3, e5m2, mxfp8, mxfp8_e5m2, mxfp4 or nvfp4, not ", name);
  return *found;
}

// Where a row's scales are.
struct Grid {
  int64_t scale_rows, scales;
  ScaledParams params;
};

// log2 of a side of a block of numbers with one scale, 31 for 0, which is all.
uint32_t side_shift(const char* op, int64_t side, int64_t least) {
  check(side == 0 || (side >= least && std::has_single_bit(static_cast<uint64_t>(side))), "metalcore::", op,
        ": block must have sides of 0 (all) or powers of 2, at least ", QUANT_SLICE, " in a row, not ", side);
  return side == 0 ? 31 : static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(side)));
}

Grid grid_of(const char* op, const ScaledFormat& format, int64_t rows, int64_t length,
             const std::vector<int64_t>& block) {
  std::vector<int64_t> sides = block;
  if (format.of_scale) sides = {1, format.of_scale};
  check(sides.size() == 2 && (!format.of_scale || block.empty() || block == sides), "metalcore::", op, ": ",
        format.name, format.of_scale ? " has blocks of its own" : " needs a block of 2 sides");
  const uint32_t rows_shift = side_shift(op, sides[0], 1);
  const uint32_t columns_shift = side_shift(op, sides[1], format.of_scale ? format.of_scale : QUANT_SLICE);
  const auto parts = [](int64_t count, int64_t side) {
    return side ? ceil_div(count, side) : static_cast<int64_t>(count > 0);
  };
  const int64_t scales = parts(length, sides[1]);
  return {.scale_rows = parts(rows, sides[0]),
          .scales = scales,
          .params = {.slices = grid_side(length / QUANT_SLICE),
                     .scales = grid_side(scales),
                     .rows_shift = rows_shift,
                     .columns_shift = sides[1] ? columns_shift - 4 : 31,  // of runs of 16
                     .kind = format.kind,
                     .factor = 0}};
}

void check_factor(const char* op, const MaybeTensor& factor, const Tensor& on, int64_t matrices) {
  if (!factor) return;
  check_float32(op, "factor", *factor);
  check_same_device(op, "factor", *factor, on);
  check(factor->numel() == matrices, "metalcore::", op, ": factor must have ", matrices, " elements, not ",
        factor->numel());
}

struct ScaledWeights {
  static constexpr const char* rows_kernel = "scaled_rows_";
  static constexpr bool takes_tiles = true;
  const ScaledFormat& type;
  Tensor packed, scales;
  MaybeTensor factor;
  int64_t matrices, rows, length;
  Grid grid;

  std::string kernel() const { return type.kernel; }
  std::string format() const { return type.name; }
  // Places have a row above the slices, which are their lower 32 bits.
  uint64_t row_bytes() const { return UINT64_C(1) << 32; }
  uint64_t expert_bytes() const { return 1; }  // a matrix
  double bytes(int64_t of_rows) const {
    return static_cast<double>(of_rows * (length * type.bits / 8)) +
           static_cast<double>(of_rows * scales.numel() * static_cast<int64_t>(scales.element_size())) /
               static_cast<double>(std::max<int64_t>(1, matrices * rows));
  }
  uint32_t bind(gpu::Recording& recording) const {
    recording.buffer(0, packed).buffer(1, scales).buffer(2, scales).buffer(3, factor ? *factor : scales);
    recording.bytes(4, grid.params);
    return 5;
  }
  uint32_t bind_sizes(gpu::Recording& recording, uint32_t at) const {
    recording.bytes(at, ScaledExpertsParams{.rows = static_cast<uint64_t>(rows),
                                            .scale_rows = static_cast<uint64_t>(grid.scale_rows)});
    return at + 1;
  }
};

// `dims` is 3 where there are several matrices.
ScaledWeights scaled_weights(const char* op, const Tensor& packed, const Tensor& scales, const MaybeTensor& factor,
                             const std::string& name, const std::vector<int64_t>& block, int64_t dims) {
  const ScaledFormat& format = scaled_format(op, name);
  check(packed.scalar_type() == ScalarType::Byte && packed.dim() == dims, "metalcore::", op,
        ": packed must be uint8 with ", dims, " dimensions, not ", dtype_name(packed.scalar_type()), " of shape ",
        shape_text(packed));
  const int64_t matrices = dims == 3 ? packed.size(0) : 1, rows = packed.size(-2);
  const int64_t length = packed.size(-1) * 8 / format.bits;
  check(length % QUANT_SLICE == 0, "metalcore::", op, ": rows of ", length, " numbers are no multiples of ",
        QUANT_SLICE);
  Grid grid = grid_of(op, format, rows, length, block);
  const ScalarType wanted = format.kind == SCALED_FLOAT ? ScalarType::Float : ScalarType::Byte;
  const bool shaped = scales.dim() == dims && scales.size(-2) == grid.scale_rows && scales.size(-1) == grid.scales &&
                      (dims == 2 || scales.size(0) == matrices);
  check(shaped && scales.scalar_type() == wanted, "metalcore::", op, ": scales must be ", dtype_name(wanted), " (",
        dims == 3 ? "matrices, " : "", grid.scale_rows, ", ", grid.scales, "), and are ",
        dtype_name(scales.scalar_type()), " of shape ", shape_text(scales));
  check_same_device(op, "scales", scales, packed);
  check_factor(op, factor, packed, matrices);
  grid.params.factor = factor ? 1 : 0;
  return {.type = format,
          .packed = from_multiple_of_16(packed),
          .scales = as_contiguous(scales),
          .factor = as_contiguous(factor),
          .matrices = matrices,
          .rows = rows,
          .length = length,
          .grid = grid};
}

Tensor scaled_rows(const Tensor& packed, const Tensor& scales, const MaybeTensor& factor, const MaybeTensor& rows,
                   const std::string& format, const std::vector<int64_t>& block, ScalarType dtype) {
  const char* const op = "scaled_rows";
  const ScaledWeights weights = scaled_weights(op, packed, scales, factor, format, block, 2);
  check_rows(op, rows, dtype, packed);
  return numbers_of(op, weights, rows, dtype);
}

Tensor scaled_matmul(const Tensor& x, const Tensor& packed, const Tensor& scales, const MaybeTensor& factor,
                     const std::string& format, const std::vector<int64_t>& block, bool transposed) {
  const char* const op = "scaled_matmul";
  return multiply(op, x, scaled_weights(op, packed, scales, factor, format, block, 2), transposed);
}

Tensor scaled_matmul_experts(const Tensor& x, const Tensor& packed, const Tensor& scales, const MaybeTensor& factor,
                             const Tensor& experts, const std::string& format, const std::vector<int64_t>& block) {
  const char* const op = "scaled_matmul_experts";
  return multiply_by_experts(op, x, scaled_weights(op, packed, scales, factor, format, block, 3), experts);
}

uint32_t rounding_of(const char* op, const std::string& name) {
  check(name == "floor" || name == "ceil" || name == "even", "metalcore::", op,
        ": rounding must be floor, ceil or even, not ", name);
  return name == "floor" ? SCALED_FLOOR : name == "ceil" ? SCALED_CEIL : SCALED_EVEN;
}

// `scales` are float32 for formats whose scales are, and are returned. They are made for the other formats.
std::tuple<Tensor, Tensor> scaled_quantize(const Tensor& numbers, const MaybeTensor& scales, const MaybeTensor& factor,
                                           const std::string& name, const std::vector<int64_t>& block,
                                           const std::string& rounding) {
  const char* const op = "scaled_quantize";
  const ScaledFormat& format = scaled_format(op, name);
  check_float(op, "numbers", numbers);
  check(numbers.dim() == 2 && numbers.size(1) % QUANT_SLICE == 0, "metalcore::", op,
        ": numbers must have rows of a multiple of ", QUANT_SLICE, ", not shape ", shape_text(numbers));
  const int64_t rows = numbers.size(0), length = numbers.size(1);
  Grid grid = grid_of(op, format, rows, length, block);
  check_factor(op, factor, numbers, 1);
  grid.params.factor = factor ? 1 : 0;
  const bool given = format.kind == SCALED_FLOAT;
  check(given == scales.has_value(), "metalcore::", op, ": ", format.name, given ? " needs scales" : " makes scales");
  if (given) {
    check_float32(op, "scales", *scales);
    check_same_device(op, "scales", *scales, numbers);
    check(scales->dim() == 2 && scales->size(0) == grid.scale_rows && scales->size(1) == grid.scales, "metalcore::", op,
          ": scales must have shape (", grid.scale_rows, ", ", grid.scales, "), not ", shape_text(*scales));
  }
  const Tensor packed = new_tensor({{rows, length * format.bits / 8}}, ScalarType::Byte, numbers);
  const Tensor used = new_tensor({{given ? 0 : grid.scale_rows, given ? 0 : grid.scales}}, ScalarType::Byte, numbers);
  gpu::note_plan(op, "slices", [&] { return std::string("a thread packs 32 numbers as ") + format.name; });
  if (packed.numel() == 0) return {packed, used};
  const Tensor from = from_multiple_of_16(numbers), of = given ? as_contiguous(*scales) : used;
  const int64_t count = rows * (length / QUANT_SLICE), at_once = INT32_MAX / QUANT_SLICE * QUANT_SLICE;
  gpu::record(packed, [&](gpu::Recording& recording) {
    for (int64_t first = 0; first < count; first += at_once) {
      const int64_t part = std::min(at_once, count - first);
      recording.kernel("scaled_quantize_", format.name).buffer(0, from).buffer(1, packed).buffer(2, of).buffer(3, of);
      recording.buffer(4, factor ? as_contiguous(*factor) : of).bytes(5, grid.params);
      recording.bytes(6, ScaledQuantizeParams{.from = static_cast<uint64_t>(first),
                                              .count = grid_side(part),
                                              .dtype = quant_dtype(from.scalar_type()),
                                              .rounding = rounding_of(op, rounding)});
      recording.work(QUANTIZE_OPERATIONS * static_cast<double>(part * QUANT_SLICE),
                     static_cast<double>(part * QUANT_SLICE) *
                         (static_cast<double>(from.element_size()) + static_cast<double>(format.bits) / 8));
      recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(part, SCALED_QUANTIZE_THREADS))},
                                      {SCALED_QUANTIZE_THREADS});
    }
  });
  return {packed, used};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "scaled_rows(Tensor packed, Tensor scales, Tensor? factor, Tensor? rows, str format, int[] block, ScalarType "
      "dtype) -> Tensor");
  m.def(
      "scaled_matmul(Tensor x, Tensor packed, Tensor scales, Tensor? factor, str format, int[] block, bool transposed) "
      "-> Tensor");
  m.def(
      "scaled_matmul_experts(Tensor x, Tensor packed, Tensor scales, Tensor? factor, Tensor experts, str format, int[] "
      "block) -> Tensor");
  m.def(
      "scaled_quantize(Tensor numbers, Tensor? scales, Tensor? factor, str format, int[] block, str rounding) -> "
      "(Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::scaled_rows>("scaled_rows");
  m.impl<&metalcore::scaled_matmul>("scaled_matmul");
  m.impl<&metalcore::scaled_matmul_experts>("scaled_matmul_experts");
  m.impl<&metalcore::scaled_quantize>("scaled_quantize");
}

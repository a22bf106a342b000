// Numbers of 8 and 4 bits with scales on a grid. scaled_quantize packs them, scaled_rows makes numbers of them again,
// scaled_matmul multiplies with them: x Wᵀ, or with `transposed` x W, which is the gradient by x, and
// scaled_matmul_experts with a matrix of its own for each row of the result.
#include "../../../kernels/quant/scaled.h"

#include "../../../kernels/quant/quant.h"
#include "formats.h"
#include "mul_mv.h"
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
  const ScaledFormat& format;
  Tensor packed, scales;
  MaybeTensor factor;
  int64_t matrices, rows, length;
  Grid grid;

  double bytes(int64_t of_rows) const {
    return static_cast<double>(of_rows * (length * format.bits / 8)) +
           static_cast<double>(of_rows * scales.numel() * static_cast<int64_t>(scales.element_size())) /
               static_cast<double>(std::max<int64_t>(1, matrices * rows));
  }
  uint32_t bind(gpu::Recording& recording) const {
    recording.buffer(0, packed).buffer(1, scales).buffer(2, scales).buffer(3, factor ? *factor : scales);
    recording.bytes(4, grid.params);
    return 5;
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
  return {.format = format,
          .packed = from_multiple_of_16(packed),
          .scales = as_contiguous(scales),
          .factor = as_contiguous(factor),
          .matrices = matrices,
          .rows = rows,
          .length = length,
          .grid = grid};
}

constexpr uint64_t kRow = UINT64_C(1) << 32;  // a row among places, of which slices are the lower 32 bits

Tensor numbers_of(const char* op, const ScaledWeights& weights, const MaybeTensor& rows, ScalarType dtype) {
  const RowsReader reader{.kernel = std::string("scaled_rows_") + weights.format.kernel,
                          .format = weights.format.name,
                          .packed = weights.packed,
                          .rows = weights.rows,
                          .length = weights.length,
                          .row_bytes = kRow,
                          .bind = [&](gpu::Recording& recording) { return weights.bind(recording); },
                          .bytes = [&](int64_t count) { return weights.bytes(count); }};
  return rows_as_numbers(op, reader, rows, dtype);
}

Tensor scaled_rows(const Tensor& packed, const Tensor& scales, const MaybeTensor& factor, const MaybeTensor& rows,
                   const std::string& format, const std::vector<int64_t>& block, ScalarType dtype) {
  const char* const op = "scaled_rows";
  const ScaledWeights weights = scaled_weights(op, packed, scales, factor, format, block, 2);
  check_rows(op, rows, dtype, packed);
  return numbers_of(op, weights, rows, dtype);
}

// `result` has `x_rows` rows. `chosen` are the experts of its rows, or nullptr.
void mul_mv(const char* op, const Tensor& x, const ScaledWeights& weights, const Tensor* chosen, int64_t x_rows,
            int64_t shared, const Tensor& result) {
  const MvPlan plan = plan_mv(weights.rows, weights.length, x_rows, chosen != nullptr, x);
  const std::optional<TilesPlan> tiles = chosen ? std::nullopt : plan_tiles(weights.length, x_rows, x);
  if (tiles)
    tiles->note(op, x_rows, weights.format.name);
  else
    plan.note(op, x_rows, weights.format.name);
  if (result.numel() == 0) return;
  const Tensor input = from_multiple_of_16(x);
  const int64_t groups = tiles ? tiles->threadgroups(weights.rows, x_rows) : plan.threadgroups(weights.rows, x_rows);
  const uint32_t simdgroups = tiles ? tiles->simdgroups : plan.simdgroups;
  gpu::record(result, [&](gpu::Recording& recording) {
    const std::string format = weights.format.kernel;
    recording.kernel(tiles ? tiles->kernel(format, x.scalar_type()) : plan.kernel(format));
    weights.bind(recording);
    recording.buffer(5, input).buffer(6, result).buffer(7, result);
    recording.buffer(8, chosen ? MaybeTensor(*chosen) : std::nullopt);
    recording.bytes(9, ScaledExpertsParams{.rows = static_cast<uint64_t>(weights.rows),
                                           .scale_rows = static_cast<uint64_t>(weights.grid.scale_rows)});
    recording.bytes(10, QuantMvParams{.row_bytes = kRow,
                                      .expert_bytes = 1,  // a matrix
                                      .weights = grid_side(weights.rows),
                                      .slices = grid_side(weights.length / QUANT_SLICE),
                                      .x_rows = grid_side(x_rows),
                                      .shared = grid_side(shared),
                                      .experts = chosen ? grid_side(weights.matrices) : 0u,
                                      .group_rows = plan.group_rows,
                                      .dtype = quant_dtype(x.scalar_type())});
    recording.work(2.0 * static_cast<double>(x_rows * weights.rows * weights.length),
                   weights.bytes(weights.rows * (chosen ? x_rows : 1)));
    recording.dispatch_threadgroups({grid_side(groups)}, {32 * simdgroups});
  });
}

Tensor scaled_matmul(const Tensor& x, const Tensor& packed, const Tensor& scales, const MaybeTensor& factor,
                     const std::string& format, const std::vector<int64_t>& block, bool transposed) {
  const char* const op = "scaled_matmul";
  const ScaledWeights weights = scaled_weights(op, packed, scales, factor, format, block, 2);
  const int64_t x_rows = check_x(op, x, packed, weights.rows, weights.length, transposed);
  const bool tiles = plan_tiles(weights.length, x_rows, x).has_value();
  if (transposed || (x_rows > most_mv_rows(x) && !tiles) || weights.length == 0)
    return multiply_numbers(op, x, x_rows, transposed,
                            [&] { return numbers_of(op, weights, std::nullopt, x.scalar_type()); });
  const Tensor result = result_like(x, weights.rows);
  mul_mv(op, x, weights, nullptr, x_rows, 1, result);
  return result;
}

Tensor scaled_matmul_experts(const Tensor& x, const Tensor& packed, const Tensor& scales, const MaybeTensor& factor,
                             const Tensor& experts, const std::string& format, const std::vector<int64_t>& block) {
  const char* const op = "scaled_matmul_experts";
  const ScaledWeights weights = scaled_weights(op, packed, scales, factor, format, block, 3);
  check_x(op, x, packed, weights.rows, weights.length, false);
  const ChosenExperts chosen = check_experts(op, x, experts);
  const Tensor result = new_tensor({{chosen.tokens, chosen.each, weights.rows}}, x.scalar_type(), x);
  check((weights.matrices > 0 && weights.length > 0) || result.numel() == 0, "metalcore::", op,
        ": packed has no numbers");
  mul_mv(op, x, weights, &chosen.experts, chosen.results(), chosen.shared, result);
  return result;
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

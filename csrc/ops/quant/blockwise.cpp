// Numbers in blocks that share a scale. quantize_blockwise packs them, dequantize_blockwise makes numbers of them
// again, and blockwise_matmul multiplies with weights of 4 bits: x Wᵀ, or with `transposed` x W, which is the gradient
// by x.
#include "../../../kernels/quant/blockwise.h"

#include "../../../kernels/quant/quant.h"
#include "formats.h"
#include "packed_products.h"
#include "rows.h"

#include <algorithm>
#include <bit>
#include <string>
#include <tuple>
#include <vector>

namespace metalcore {
namespace {

struct BlockwiseType {
  const char* kernel;  // as in the kernels' names
  int64_t bits;
};

BlockwiseType blockwise_type(const char* op, const std::string& type) {
  if (type == "nf4") return {"NF4", 4};
  if (type == "fp4") return {"FP4", 4};
  check(type == "code", "metalcore::", op, ": type must be \"nf4\", \"fp4\" or \"code\", not \"", type, "\"");
  return {"Code8", 8};
}

// The table of 8 bits, which other types have none of.
MaybeTensor check_code(const char* op, const BlockwiseType& type, const MaybeTensor& code, const Tensor& on) {
  check(code.has_value() == (type.bits == 8), "metalcore::", op, ": ",
        type.bits == 8 ? "8 bits need a code" : "only 8 ", type.bits == 8 ? "" : "bits take a code");
  if (!code) return code;
  check_float32(op, "code", *code);
  check_same_device(op, "code", *code, on);
  check(code->numel() == 256, "metalcore::", op, ": code must have 256 elements, not ", code->numel());
  return as_contiguous(code);
}

uint32_t block_shift(const char* op, int64_t block_size) {
  const bool power = block_size > 0 && std::has_single_bit(static_cast<uint64_t>(block_size));
  check(power && block_size >= QUANT_SLICE && block_size <= BLOCKWISE_MOST, "metalcore::", op,
        ": block_size must be a power of 2 from ", QUANT_SLICE, " to ", BLOCKWISE_MOST, ", not ", block_size);
  return static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(block_size)));
}

// A dispatch's threads are counted in 32 bits, and its threadgroups are multiples of every block.
constexpr int64_t kAtOnce = INT64_C(1) << 32;

gpu::BufferView beyond(const Tensor& tensor, int64_t bytes) {
  const gpu::BufferView view = gpu::view_of(tensor);
  return {view.storage, view.offset + bytes, view.span - bytes, view.tensor};
}

// Packed numbers and their blocks' scales, checked.
struct Blocks {
  BlockwiseType type;
  Tensor packed, absmax;
  MaybeTensor scales, code, offset;  // the scales in 8 bits, with their table and mean
  BlockwiseParams params;

  // Binds the scales from an index on. What is not read is bound to something.
  void bind(gpu::Recording& recording, uint32_t at, int64_t first_block) const {
    const int64_t width = scales ? 1 : static_cast<int64_t>(sizeof(float));
    const int64_t first = scales ? first_block >> BLOCKWISE_SCALE_BLOCK : first_block;
    recording.buffer(at, beyond(absmax, first * static_cast<int64_t>(sizeof(float))));
    recording.buffer(at + 1, scales ? beyond(*scales, first_block * width) : gpu::view_of(absmax));
    recording.buffer(at + 2, code ? *code : absmax).buffer(at + 3, offset ? *offset : absmax);
  }
};

Blocks check_blocks(const char* op, const Tensor& packed, const Tensor& absmax, const MaybeTensor& scales,
                    const MaybeTensor& code, const MaybeTensor& offset, const std::string& type, int64_t block_size,
                    int64_t count, ScalarType dtype) {
  Blocks blocks{.type = blockwise_type(op, type),
                .packed = from_multiple_of_16(packed),
                .absmax = as_contiguous(absmax),
                .scales = as_contiguous(scales),
                .code = as_contiguous(code),
                .offset = offset,
                .params = {}};
  const uint32_t shift = block_shift(op, block_size);
  check(packed.scalar_type() == ScalarType::Byte, "metalcore::", op, ": packed must be uint8, not ",
        dtype_name(packed.scalar_type()));
  const int64_t bytes = ceil_div<int64_t>(count * blocks.type.bits, 8);
  check(packed.numel() == bytes, "metalcore::", op, ": ", count, " numbers of ", blocks.type.bits, " bits have ", bytes,
        " bytes, and packed has ", packed.numel());
  check(scales.has_value() == code.has_value() && scales.has_value() == offset.has_value(), "metalcore::", op,
        ": scales in 8 bits need scales, scales_code and offset");
  const int64_t parts = ceil_div(count, block_size);
  check_float32(op, "absmax", absmax);
  check_same_device(op, "absmax", absmax, packed);
  const int64_t wanted = scales ? ceil_div<int64_t>(parts, 1 << BLOCKWISE_SCALE_BLOCK) : parts;
  check(absmax.numel() == wanted, "metalcore::", op, ": absmax must have ", wanted, " elements, not ", absmax.numel());
  if (scales) {
    check(scales->scalar_type() == ScalarType::Byte && scales->numel() == parts, "metalcore::", op,
          ": scales must be uint8 with ", parts, " elements");
    check_float32(op, "scales_code", *code);
    check_float32(op, "offset", *offset);
    check(code->numel() == 256 && offset->numel() == 1, "metalcore::", op,
          ": scales_code must have 256 elements, and offset one");
    for (const MaybeTensor& each : {scales, code, offset}) check_same_device(op, "scales", *each, packed);
  }
  blocks.params = {
      .count = static_cast<uint64_t>(count), .shift = shift, .dtype = quant_dtype(dtype), .nested = scales.has_value()};
  return blocks;
}

std::tuple<Tensor, Tensor> quantize_blockwise(const Tensor& numbers, const std::string& type, int64_t block_size,
                                              const MaybeTensor& code) {
  const char* const op = "quantize_blockwise";
  const BlockwiseType format = blockwise_type(op, type);
  check_float(op, "numbers", numbers);
  const MaybeTensor table = check_code(op, format, code, numbers);
  const uint32_t shift = block_shift(op, block_size);
  const int64_t count = numbers.numel();
  const int64_t bytes = ceil_div<int64_t>(count * format.bits, 8), blocks = ceil_div(count, block_size);
  const Tensor packed = new_tensor({&bytes, 1}, ScalarType::Byte, numbers);
  const Tensor absmax = new_tensor({&blocks, 1}, ScalarType::Float, numbers);
  gpu::note_plan(op, "blocks", [&] {
    return std::to_string(block_size / BLOCKWISE_RUN) + " threads pack a block as " + format.kernel;
  });
  if (count == 0) return {packed, absmax};
  const Tensor from = from_multiple_of_16(numbers);
  const int64_t item = static_cast<int64_t>(from.element_size());
  const uint32_t threads = static_cast<uint32_t>(std::max<int64_t>(BLOCKWISE_THREADS, block_size / BLOCKWISE_RUN));
  gpu::record(packed, [&](gpu::Recording& recording) {
    for (int64_t first = 0; first < count; first += kAtOnce) {
      const int64_t part = std::min(kAtOnce, count - first);
      const gpu::BufferView x = beyond(from, first * item), y = beyond(packed, first * format.bits / 8);
      recording.kernel("blockwise_quantize_", format.kernel).buffer(0, x).buffer(1, x).buffer(2, x);
      recording.buffer(3, table ? *table : absmax).buffer(4, y).buffer(5, y);
      recording.buffer(6, beyond(absmax, (first >> shift) * static_cast<int64_t>(sizeof(float))));
      recording.bytes(7, BlockwiseParams{static_cast<uint64_t>(part), shift, quant_dtype(from.scalar_type()), 0});
      recording.work(QUANTIZE_OPERATIONS * static_cast<double>(part),
                     static_cast<double>(part * item + part * format.bits / 8));
      recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(part, threads * BLOCKWISE_RUN))}, {threads});
    }
  });
  return {packed, absmax};
}

Tensor numbers_of(const char* op, const Blocks& blocks, const MaybeTensor& table, Sizes shape, ScalarType dtype) {
  const Tensor result = new_tensor(shape, dtype, blocks.packed);
  gpu::note_plan(op, "runs", [&] { return std::string("a thread makes eight numbers of ") + blocks.type.kernel; });
  const int64_t count = result.numel(), item = static_cast<int64_t>(result.element_size());
  if (count == 0) return result;
  BlockwiseParams params = blocks.params;
  gpu::record(result, [&](gpu::Recording& recording) {
    for (int64_t first = 0; first < count; first += kAtOnce) {
      const int64_t part = std::min(kAtOnce, count - first);
      params.count = static_cast<uint64_t>(part);
      const gpu::BufferView x = beyond(blocks.packed, first * blocks.type.bits / 8), y = beyond(result, first * item);
      recording.kernel("blockwise_dequantize_", blocks.type.kernel).buffer(0, x).buffer(1, x);
      blocks.bind(recording, 2, first >> params.shift);
      recording.buffer(6, table ? *table : blocks.absmax).buffer(7, y).buffer(8, y).buffer(9, y).bytes(10, params);
      recording.work(static_cast<double>(part), static_cast<double>(part * blocks.type.bits / 8 + part * item));
      recording.dispatch_threadgroups(
          {grid_side(ceil_div<int64_t>(part, BLOCKWISE_THREADS * BLOCKWISE_UNITS * BLOCKWISE_RUN))},
          {BLOCKWISE_THREADS});
    }
  });
  return result;
}

Tensor dequantize_blockwise(const Tensor& packed, const Tensor& absmax, const MaybeTensor& scales,
                            const MaybeTensor& scales_code, const MaybeTensor& offset, const std::string& type,
                            int64_t block_size, const MaybeTensor& code, const std::vector<int64_t>& shape,
                            ScalarType dtype) {
  const char* const op = "dequantize_blockwise";
  check(is_float_dtype(dtype), "metalcore::", op, ": dtype must be float32, float16 or bfloat16");
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  const Blocks blocks = check_blocks(op, packed, absmax, scales, scales_code, offset, type, block_size, count, dtype);
  return numbers_of(op, blocks, check_code(op, blocks.type, code, packed), {shape.data(), shape.size()}, dtype);
}

Tensor blockwise_matmul(const Tensor& x, const Tensor& packed, const Tensor& absmax, const MaybeTensor& scales,
                        const MaybeTensor& scales_code, const MaybeTensor& offset, const std::string& type,
                        int64_t block_size, int64_t rows, int64_t length, bool transposed) {
  const char* const op = "blockwise_matmul";
  check(type != "code", "metalcore::", op, ": type must be \"nf4\" or \"fp4\"");
  const int64_t x_rows = check_x(op, x, packed, rows, length, transposed);
  const Blocks blocks =
      check_blocks(op, packed, absmax, scales, scales_code, offset, type, block_size, rows * length, x.scalar_type());
  const std::optional<TilesPlan> tiles = transposed ? std::nullopt : plan_tiles(length, x_rows, x);
  if (!tiles && (transposed || x_rows > most_mv_rows(x) || length == 0 || length % QUANT_SLICE != 0))
    return multiply_numbers(op, x, x_rows, transposed,
                            [&] { return numbers_of(op, blocks, std::nullopt, {{rows, length}}, x.scalar_type()); });
  const Tensor result = result_like(x, rows);
  const MvPlan plan = plan_mv(rows, length, x_rows, false, x);
  if (tiles)
    tiles->note(op, x_rows, blocks.type.kernel);
  else
    plan.note(op, x_rows, blocks.type.kernel);
  if (result.numel() == 0) return result;
  const Tensor input = from_multiple_of_16(x);
  const QuantMvParams params{.row_bytes = static_cast<uint64_t>(length / 2),
                             .expert_bytes = 0,
                             .weights = grid_side(rows),
                             .slices = grid_side(length / QUANT_SLICE),
                             .x_rows = grid_side(x_rows),
                             .shared = 1,
                             .experts = 0,
                             .group_rows = plan.group_rows,
                             .dtype = quant_dtype(x.scalar_type())};
  const std::string format = std::string(blocks.type.kernel) + (blocks.params.nested ? "_nested" : "");
  const int64_t groups = tiles ? tiles->threadgroups(rows, x_rows) : plan.threadgroups(rows, x_rows);
  const uint32_t simdgroups = tiles ? tiles->simdgroups : plan.simdgroups;
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel(tiles ? tiles->kernel(format, x.scalar_type()) : plan.kernel(format));
    recording.buffer(0, blocks.packed).buffer(1, input).buffer(2, result).buffer(3, result);
    blocks.bind(recording, 4, 0);
    recording.bytes(8, params).bytes(9, blocks.params);
    recording.work(2.0 * static_cast<double>(x_rows * rows * length), static_cast<double>(rows * length / 2));
    recording.dispatch_threadgroups({grid_side(groups)}, {32 * simdgroups});
  });
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("quantize_blockwise(Tensor numbers, str type, int block_size, Tensor? code) -> (Tensor, Tensor)");
  m.def(
      "dequantize_blockwise(Tensor packed, Tensor absmax, Tensor? scales, Tensor? scales_code, Tensor? offset, str "
      "type, "
      "int block_size, Tensor? code, int[] shape, ScalarType dtype) -> Tensor");
  m.def(
      "blockwise_matmul(Tensor x, Tensor packed, Tensor absmax, Tensor? scales, Tensor? scales_code, Tensor? offset, "
      "str type, int block_size, int rows, int length, bool transposed) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::quantize_blockwise>("quantize_blockwise");
  m.impl<&metalcore::dequantize_blockwise>("dequantize_blockwise");
  m.impl<&metalcore::blockwise_matmul>("blockwise_matmul");
}

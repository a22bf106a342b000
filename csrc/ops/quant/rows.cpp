// Rows of packed weights as numbers, and the shapes of products with them.
#include "rows.h"

#include "../../../kernels/quant/quant.h"
#include "formats.h"

#include <algorithm>
#include <vector>

namespace metalcore {

void check_rows(const char* op, const MaybeTensor& rows, ScalarType dtype, const Tensor& packed) {
  check(is_float_dtype(dtype), "metalcore::", op, ": dtype must be float32, float16 or bfloat16");
  if (!rows) return;
  check(rows->scalar_type() == ScalarType::Long, "metalcore::", op, ": rows must be int64, not ",
        dtype_name(rows->scalar_type()));
  check_same_device(op, "rows", *rows, packed);
}

Tensor rows_as_numbers(const char* op, const RowsReader& reader, const MaybeTensor& rows, ScalarType dtype) {
  std::vector<int64_t> sizes{reader.rows};
  if (rows) sizes.assign(rows->sizes().begin(), rows->sizes().end());
  sizes.push_back(reader.length);
  const Tensor result = new_tensor({sizes.data(), sizes.size()}, dtype, reader.packed);
  gpu::note_plan(op, "slices", [&] { return "a thread has 32 weights of " + reader.format; });
  if (result.numel() == 0) return result;
  check(reader.rows > 0, "metalcore::", op, ": packed has no rows, and rows has indices");

  const Tensor indices = rows ? as_contiguous(*rows) : reader.packed;
  const int64_t count = result.numel() / reader.length, slices = reader.length / QUANT_SLICE;
  const int64_t at_once = std::max<int64_t>(1, INT32_MAX / 8 / slices);  // the kernel counts fours in 32 bits
  gpu::record(result, [&](gpu::Recording& recording) {
    for (int64_t from = 0; from < count; from += at_once) {
      const int64_t part = std::min(at_once, count - from);
      recording.kernel(reader.kernel);
      const uint32_t next = reader.bind(recording);
      recording.buffer(next, indices).buffer(next + 1, result);
      recording.bytes(next + 2, QuantRowsParams{.row_bytes = reader.row_bytes,
                                                .from = static_cast<uint64_t>(from),
                                                .count = grid_side(part * slices),
                                                .weights = grid_side(reader.rows),
                                                .slices = grid_side(slices),
                                                .gathered = rows ? 1u : 0u,
                                                .dtype = quant_dtype(dtype)});
      recording.work(static_cast<double>(part * reader.length),
                     reader.bytes(part) + static_cast<double>(part * reader.length * result.element_size()));
      recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(part * slices, QUANT_ROWS_THREADS))},
                                      {QUANT_ROWS_THREADS});
    }
  });
  return result;
}

int64_t check_x(const char* op, const Tensor& x, const Tensor& packed, int64_t rows, int64_t length, bool transposed) {
  check_float(op, "x", x);
  check_same_device(op, "packed", packed, x);
  check(x.dim() >= 1 && x.size(-1) == (transposed ? rows : length), "metalcore::", op, ": x of shape ", shape_text(x),
        " does not go with ", rows, " rows of ", length, " weights");
  int64_t x_rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) x_rows *= x.size(d);
  return x_rows;
}

ChosenExperts check_experts(const char* op, const Tensor& x, const Tensor& experts) {
  check_same_device(op, "experts", experts, x);
  check(experts.scalar_type() == ScalarType::Int && experts.dim() == 2, "metalcore::", op,
        ": experts must be int32 with 2 dimensions");
  const int64_t tokens = experts.size(0), each = experts.size(1);
  const bool own = x.dim() == 3;
  check((own || x.dim() == 2) && x.size(0) == tokens && (!own || x.size(1) == each), "metalcore::", op, ": x of shape ",
        shape_text(x), " does not go with experts of shape ", shape_text(experts));
  return {as_contiguous(experts), tokens, each, own ? 1 : each};
}

Tensor result_like(const Tensor& x, int64_t last) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = last;
  return new_tensor({sizes.data(), sizes.size()}, x.scalar_type(), x);
}

Tensor multiply_numbers(const char* op, const Tensor& x, int64_t x_rows, bool transposed,
                        const std::function<Tensor()>& numbers) {
  gpu::note_plan(op, "torch", [&] {
    return std::to_string(x_rows) + " rows of x: the weights become numbers, which PyTorch's matmul multiplies";
  });
  const Tensor weights = numbers();
  return torch::stable::matmul(x, transposed ? weights : torch::stable::transpose(weights, 0, 1));
}

}  // namespace metalcore

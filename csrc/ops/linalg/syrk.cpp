// syrk(A, C, triangle, transpose, alpha, beta): alpha A Aᵀ + beta C of a batch of float32 matrices of any strides, or
// alpha Aᵀ A + beta C; the whole of it, or one triangle and zeros in the other. Row-major results.
#include "syrk.h"

#include "../plan.h"
#include "../rows.h"
#include "matrices.h"

#include <optional>
#include <string>

namespace metalcore {

void encode_syrk(gpu::Encoder& encoder, const gpu::BufferView& a, const gpu::BufferView& c,
                 const gpu::BufferView& result, SyrkParams p, uint32_t batch) {
  const int64_t side = ceil_div<int64_t>(p.n, SYRK_TILE);
  p.tiles = grid_side(side * (side + 1) / 2);
  encoder.kernel("syrk").buffer(0, a).buffer(1, c).buffer(2, result).bytes(3, p);
  encoder.dispatch_threadgroups({grid_side(int64_t{p.tiles} * batch)}, {SYRK_THREADS});
}

namespace {

struct Triangles {
  uint32_t lower, upper;
};
Triangles triangles(const std::string& name) {
  check(name == "full" || name == "lower" || name == "upper",
        "metalcore::syrk: triangle must be 'full', 'lower' or 'upper', not '", name, "'");
  return {name == "upper" ? SYRK_ZERO : SYRK_WRITE, name == "lower" ? SYRK_ZERO : SYRK_WRITE};
}

// Whether the rows of A, or of its transpose, consist of float4, `length` entries each.
bool row_vectors(const Matrices& a, bool transpose, int64_t length) {
  const int64_t row = transpose ? a.column_stride : a.row_stride, column = transpose ? a.row_stride : a.column_stride;
  return column == 1 && length % 4 == 0 && aligned16(a.tensor, a.batch_stride, row);
}

Tensor syrk(const Tensor& input, const std::optional<Tensor>& c, const std::string& triangle, bool transpose,
            double alpha, double beta) {
  check_float32("syrk", "A", input);
  if (c) check_float32("syrk", "C", *c);
  const Triangles wanted = triangles(triangle);
  check(input.dim() >= 2, "metalcore::syrk: A must have at least 2 dimensions");
  const int64_t n = input.size(transpose ? -1 : -2), k = input.size(transpose ? -2 : -1);
  const std::vector<int64_t> sizes = batch_sizes(input, {n, n});
  const Tensor result = new_tensor(sizes, ScalarType::Float, input);
  if (c) {
    check_same_device("syrk", "C", *c, input);
    check_same_shape("syrk", "C", *c, result);
  }
  if (result.numel() == 0) return result;

  const Matrices a = matrices(input), added = matrices(c.value_or(result));
  const SyrkParams p{.a_batch = a.batch_stride,
                     .a_row = transpose ? a.column_stride : a.row_stride,
                     .a_column = transpose ? a.row_stride : a.column_stride,
                     .c_batch = added.batch_stride,
                     .c_row = added.row_stride,
                     .c_column = added.column_stride,
                     .result_batch = n * n,
                     .result_row = n,
                     .n = grid_side(n),
                     .k = alpha == 0.0 ? 0 : grid_side(k),
                     .vectors = row_vectors(a, transpose, k) || row_vectors(a, !transpose, n),
                     .tiles = 0,
                     .lower = wanted.lower,
                     .upper = wanted.upper,
                     .alpha = static_cast<float>(alpha),
                     .beta = c ? static_cast<float>(beta) : 0.0f};
  gpu::encode(result, [&](gpu::Encoder& encoder) {
    encode_syrk(encoder, gpu::view_of(a.tensor), gpu::view_of(added.tensor), gpu::view_of(result), p,
                grid_side(a.batch));
  });
  return result;
}

// explain("syrk", A, transpose=…): what the Python function does, which is where PyTorch's product is taken.
Explanation explain(const Request& request) {
  check(!request.shapes.empty(), "metalcore::syrk: explain needs the shape of A");
  check(request.shapes[0].size() >= 2, "metalcore::syrk: A must have at least 2 dimensions");
  const MatrixShape a = matrix_shape(request.shapes[0]);
  const int64_t n = request.option("transpose", "False") == "True" ? a.columns : a.rows;
  if (gpu::tuning(request.device_type).syrk_torch.takes(n, a.batch))
    return {"torch", times(n, n) + ": PyTorch's product is faster on this GPU", {}};
  const int64_t side = ceil_div<int64_t>(n, SYRK_TILE);
  Explanation e{"tiles", times(n, n) + ": squares of " + std::to_string(SYRK_TILE) + " rows, of one triangle only", {}};
  if (n > 0 && a.batch > 0) e.steps.push_back({"syrk", {grid_side(side * (side + 1) / 2 * a.batch)}, {SYRK_THREADS}});
  return e;
}

const ExplainOp explain_syrk("syrk", explain);

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("syrk(Tensor A, Tensor? C, str triangle, bool transpose, float alpha, float beta) -> Tensor");
}

METALCORE_KERNELS(m) { m.impl("syrk", TORCH_BOX(&metalcore::syrk)); }

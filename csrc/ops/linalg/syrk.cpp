// syrk(A, C, triangle, transpose, alpha, beta) returns alpha A Aᵀ + beta C or alpha Aᵀ A + beta C, for float32 matrices
// of any strides: the whole matrix, or one triangle with zeros in the other. Results are row-major.
#include "matrices.h"

#include "../../gpu/cost.h"
#include "../common/rows.h"
#include "cpu_route.h"

#include <string>

namespace metalcore {

namespace {

struct SyrkTuning {
  const char* family;
  TorchRegions torch = {};  // the size is the number of the product's rows
};
const gpu::Table<SyrkTuning> syrk_tuning("syrk", {{"torch", &SyrkTuning::torch}},
                                         {{.family = "baseline"}, {.family = "hopper", .torch = {{.above = 0}}}});

}  // namespace

void record_syrk(gpu::Recording& recording, const gpu::BufferView& a, const gpu::BufferView& c,
                 const gpu::BufferView& result, SyrkParams p, uint32_t batch) {
  const int64_t side = ceil_div<int64_t>(p.n, SYRK_TILE);
  p.across = p.across > 0 ? p.across : grid_side(side);
  p.tiles = grid_side(int64_t{p.across} * (p.across + 1) / 2 + (side - p.across) * p.across);
  // Pieces are of the columns of A: each adds its product to the result of the pieces before.
  const double flops = 2.0 * SYRK_TILE * SYRK_TILE * p.tiles * batch;
  const auto record = [&](const gpu::Piece& piece) {
    p.k = grid_side(piece.count);
    recording.kernel("syrk").buffer(0, piece.of(a, 4 * p.a_column)).buffer(1, piece.first > 0 ? result : c);
    recording.buffer(2, result).bytes(3, p).work(flops * p.k, 8.0 * SYRK_TILE * SYRK_TILE * p.tiles * batch);
    recording.dispatch_threadgroups({grid_side(int64_t{p.tiles} * batch)}, {SYRK_THREADS});
    p.beta = 1.0f, p.c_batch = p.result_batch, p.c_row = p.result_row, p.c_column = 1;
  };
  if (p.k == 0)
    record({0, 0, {}});
  else
    gpu::in_pieces(recording, p.k, {flops, 0}, record, SYRK_TILE);
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

// Whether the kernel can read the rows of A, or of its transpose, as float4. Rows have `length` entries.
bool loads_vectors(const Matrices& a, bool transpose, int64_t length) {
  const int64_t row = transpose ? a.column_stride : a.row_stride, column = transpose ? a.row_stride : a.column_stride;
  return column == 1 && length % 4 == 0 && aligned16(a.tensor, a.batch_stride, row);
}

Tensor syrk(const Tensor& input, const MaybeTensor& c, const std::string& triangle, bool transpose, double alpha,
            double beta) {
  check_float32("syrk", "A", input);
  if (c) check_float32("syrk", "C", *c);
  const Triangles wanted = triangles(triangle);
  check(input.dim() >= 2, "metalcore::syrk: A must have at least 2 dimensions");
  const int64_t n = input.size(transpose ? -1 : -2), k = input.size(transpose ? -2 : -1);
  const std::vector<int64_t> sizes = batch_sizes(input, {n, n});
  const SyrkTuning& tuning = syrk_tuning(input);
  // The Python function reads the same table before it calls the operator.
  const bool torch_is_faster = tuning.torch.contain(n, matrix_shape(input.sizes()).batch);
  gpu::note_plan("syrk", torch_is_faster ? "torch" : "tiles", [&] {
    return times(n, n) + ": " +
           (torch_is_faster ? faster_by_torch(tuning.family)
                            : "squares of " + std::to_string(SYRK_TILE) + " rows, of one triangle only");
  });
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
                     .as_float4 = loads_vectors(a, transpose, k) || loads_vectors(a, !transpose, n),
                     .tiles = 0,
                     .across = 0,
                     .lower = wanted.lower,
                     .upper = wanted.upper,
                     .alpha = static_cast<float>(alpha),
                     .beta = c ? static_cast<float>(beta) : 0.0f};
  gpu::record(result, [&](gpu::Recording& recording) {
    record_syrk(recording, gpu::view_of(a.tensor), c ? gpu::view_of(added.tensor) : gpu::BufferView{},
                gpu::view_of(result), p, grid_side(a.batch));
  });
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("syrk(Tensor A, Tensor? C, str triangle, bool transpose, float alpha, float beta) -> Tensor");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::syrk>("syrk"); }

// lstsq(A, B) -> (X, residuals): least squares of float32 matrices of full rank with m >= n.
#include "../../../kernels/linalg/qr.h"
#include "../../gpu/limits.h"
#include "../common/common.h"
#include "matrices.h"
#include "qr.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

namespace metalcore {
namespace {

// Kernels of lstsq.metal: `lanes` threads share a column of up to `rows` rows.
struct Kernel {
  const char* name;
  uint32_t rows, lanes;
};
constexpr Kernel kKernels[] = {
    {"lstsq_64", 64, 4}, {"lstsq_128", 128, 4}, {"lstsq_256", 256, 8}, {"lstsq_512", 512, 16}, {"lstsq_1024", 1024, 32},
};
constexpr int64_t kThreads = 512;

// The smallest kernel that holds all columns of A and B and all rows, or the tallest. None holds more columns than its
// threads are.
const Kernel* kernel_for(int64_t rows, int64_t width) {
  const Kernel* smallest = nullptr;
  for (const Kernel& kernel : kKernels) {
    if (kernel.lanes * width > kThreads) break;
    smallest = &kernel;
    if (kernel.rows >= rows) break;
  }
  return smallest;
}

// X = R⁻¹ Qᵀ B, and the sums of squares of A X - B.
std::tuple<Tensor, Tensor> by_qr(const Tensor& a, const Tensor& b) {
  const auto [q, r, scales] = qr_scaled(a);
  const Tensor sides = call_torch<1>("aten::matmul", "", transposed(q), b)[0];
  const Tensor x = call_torch<1>("aten::mul", "Tensor", solve_triangular(r, sides, true, true, false), scales)[0];
  const Tensor product = call_torch<1>("aten::matmul", "", a, x)[0];
  const Tensor squares = call_torch<1>("aten::mse_loss", "", product, b, int64_t{0})[0];
  const std::optional<std::vector<int64_t>> rows{{-2}};
  const std::optional<ScalarType> same_dtype;
  return {as_contiguous(x), call_torch<1>("aten::sum", "dim_IntList", squares, rows, false, same_dtype)[0]};
}

std::tuple<Tensor, Tensor> lstsq(const Tensor& a_, const Tensor& b_) {
  check_float32("lstsq", "A", a_);
  check_float32("lstsq", "B", b_);
  check_same_device("lstsq", "B", b_, a_);
  const MatrixShape shape = check_matrices("lstsq", a_), sides_shape = check_matrices("lstsq", b_);
  const int64_t m = shape.rows, n = shape.columns, sides = sides_shape.columns, width = n + sides;
  check(m >= n && sides_shape.rows == m && sides_shape.batch == shape.batch,
        "metalcore::lstsq: A must have at least as many rows as columns, and B its batch and rows");
  if (shape.batch == 0)
    return {new_tensor(batch_sizes(a_, {n, sides}), ScalarType::Float, a_),
            new_tensor(batch_sizes(a_, {sides}), ScalarType::Float, a_)};
  // A level of the tree has to halve its rows at least.
  const Kernel* const tallest = n > 0 && sides > 0 ? kernel_for(m, width) : nullptr;
  if (!tallest || tallest->rows < std::min(m, 2 * n) || qr_tuning(a_).cpu.contain(n, shape.batch)) return by_qr(a_, b_);
  const Tensor x = new_tensor(batch_sizes(a_, {n, sides}), ScalarType::Float, a_);
  const Tensor residuals = new_tensor(batch_sizes(a_, {sides}), ScalarType::Float, a_);

  const Matrices a = matrices(a_), b = matrices(b_);
  LstsqParams p{.a_batch = a.batch_stride,
                .a_row = a.row_stride,
                .a_column = a.column_stride,
                .b_batch = b.batch_stride,
                .b_row = b.row_stride,
                .b_column = b.column_stride,
                .columns = grid_side(n),
                .sides = grid_side(sides),
                .rows = grid_side(m)};
  gpu::note_plan("lstsq", m <= tallest->rows ? "block" : "tall", [&] {
    return times(m, n) + " and " + std::to_string(sides) + " right sides: " +
           (m <= tallest->rows ? "one threadgroup factors and solves each"
                               : "blocks of up to " + std::to_string(tallest->rows) + " rows alone, and then their R");
  });
  MaybeTensor stack, stack_scales, stack_squares;
  for (;;) {
    const Kernel& kernel = *kernel_for(p.rows, width);
    // Whole parts of the level before stay together.
    const int64_t unit = p.parts ? n : 1, units = p.rows / unit, most = kernel.rows / unit;
    p.blocks = grid_side(ceil_div(units, most));
    p.block_rows = grid_side(ceil_div<int64_t>(units, p.blocks) * unit);
    p.blocks = ceil_div(p.rows, p.block_rows);
    p.last = p.blocks == 1;
    const Tensor r = new_tensor({shape.batch, int64_t{p.blocks} * n, width}, ScalarType::Float, a_);
    const Tensor scales = new_tensor({shape.batch, p.blocks, width}, ScalarType::Float, a_);
    const Tensor squares = p.last ? residuals : new_tensor({shape.batch, p.blocks, sides}, ScalarType::Float, a_);
    gpu::record(x, [&](gpu::Recording& recording) {
      recording.kernel(kernel.name).buffer(0, given_if(!p.parts, a.tensor)).buffer(1, given_if(!p.parts, b.tensor));
      recording.buffer(2, stack).buffer(3, stack_scales).buffer(4, stack_squares);
      recording.buffer(5, r).buffer(6, scales).buffer(7, squares).buffer(8, given_if(p.last, x)).bytes(9, p);
      recording.work(2.0 * shape.batch * p.rows * n * width);
      recording.dispatch_threadgroups({grid_side(shape.batch * p.blocks)},
                                      {round_up<uint32_t>(kernel.lanes * grid_side(width), gpu::kSimdWidth)});
    });
    if (p.last) return {x, residuals};
    stack = r, stack_scales = scales, stack_squares = squares;
    p.parts = p.blocks;
    p.rows = grid_side(int64_t{p.blocks} * n);
  }
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) { m.def("lstsq(Tensor A, Tensor B) -> (Tensor, Tensor)"); }

METALCORE_KERNELS(m) { m.impl<&metalcore::lstsq>("lstsq"); }

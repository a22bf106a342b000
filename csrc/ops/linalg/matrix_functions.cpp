// Exponentials of matrices, and what other functions of matrices need of triangular ones.
#include "../../../kernels/linalg/matrix_exp.h"
#include "../../../kernels/linalg/sylvester.h"

#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "matrices.h"

#include <string>

namespace metalcore {

// matrix_exp(A) -> exp(A) of matrices of any strides, float32 or complex64. The result is row-major.
// matrix_exp_scaled(A) -> the same for any size, by PyTorch's products (metalcore/linalg/_matrix_exp.py).
namespace {

KernelPlan plan_matrix_exp(int64_t n, int64_t batch, bool is_complex) {
  const std::string size = times(n, n);
  if (batch == 0 || n == 0) return {"empty", size + " has no entries", "", 0, 0};
  if (n > MATRIX_EXP_BLOCK_COLUMNS / (is_complex ? 2 : 1))
    return {"scaled", size + ": scaling and squaring by products of the whole batch, whose number the host waits for",
            "", 0, 0};
  if (n > (is_complex ? MATRIX_EXP_COMPLEX_COLUMNS : MATRIX_EXP_COLUMNS))
    return {"block", size + ": scaling and squaring by a threadgroup, with 4 x 4 entries a thread",
            is_complex ? "matrix_exp_block_complex" : "matrix_exp_block", 1,
            MATRIX_EXP_BLOCK_COLUMNS * MATRIX_EXP_BLOCK_COLUMNS / 16};
  const uint32_t lanes = power_from_8(n);
  const uint32_t real = lanes == 32   ? MATRIX_EXP_SIMDGROUPS_32
                        : lanes == 16 ? MATRIX_EXP_SIMDGROUPS_16
                                      : MATRIX_EXP_SIMDGROUPS_8;
  const uint32_t simdgroups = is_complex ? MATRIX_EXP_COMPLEX_SIMDGROUPS : real;
  return {"simd", size + ": scaling and squaring by " + std::to_string(lanes) + " lanes, with a column each",
          std::string("matrix_exp_simd_") + (is_complex ? "complex_" : "") + std::to_string(lanes),
          simdgroups * 32 / lanes, 32 * simdgroups};
}

}  // namespace

Tensor matrix_exp(const Tensor& input) {
  const MatrixShape s = check_square_of_numbers("linalg.matrix_exp", input);
  const KernelPlan plan = plan_matrix_exp(s.rows, s.batch, is_complex(input));
  gpu::note_plan("matrix_exp", plan.variant, [&] { return plan.why; });
  const bool is_empty = s.rows == 0 || s.batch == 0;
  if (plan.threads == 0 && !is_empty) return call_torch<1>("metalcore::matrix_exp_scaled", "", input)[0];
  const Tensor result = new_like(input);
  if (is_empty) return result;
  const Matrices a = matrices(input);
  MatrixExpParams params{a.batch_stride, a.row_stride, a.column_stride, 0, grid_side(s.rows)};
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    const auto entries = static_cast<double>(s.rows * s.rows), size = input.element_size() / 4.0;
    const double flops = 16 * size * size * entries * static_cast<double>(s.rows);  // five products, three squarings
    gpu::in_pieces(recording, s.batch, {flops, 8 * size * entries}, [&](const gpu::Piece& piece) {
      params.matrices = grid_side(piece.count);
      recording.kernel(plan.kernel).buffer(0, piece.of(a.tensor, a.batch_stride));
      recording.buffer(1, piece.of(result, s.rows * s.rows)).bytes(2, params);
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({ceil_div(params.matrices, plan.matrices_per_threadgroup)}, {plan.threads});
    });
  });
  return result;
}

// sylvester_triangular(A, B, C) -> X: A X + X B = C for upper triangular A and B. square_root_triangular(C) -> X: X X =
// C for upper triangular C. logarithm_triangular(T) -> X is made of the latter (metalcore/linalg/_logm.py). All are
// contiguous batches of complex64 matrices that are stored column by column: the arguments and results are transposes.
namespace {

Tensor solve_columns(const char* name, const Tensor& a, const Tensor& b, const Tensor& c, bool is_root) {
  const MatrixShape s = check_matrices_of_numbers(name, c);
  const int64_t rows = s.columns, columns = s.rows;  // of the matrices that are not transposed
  check(rows <= SYLVESTER_ROWS, "metalcore::", name, ": matrices may have up to ", SYLVESTER_ROWS, " rows, not ", rows);
  const Tensor x = new_like(c);
  const bool is_empty = s.batch == 0 || rows == 0 || columns == 0, in_simdgroup = rows <= 32;
  gpu::note_plan(name,
                 is_empty       ? "empty"
                 : in_simdgroup ? "simd"
                                : "block",
                 [&] {
                   return times(rows, columns) + ": a " + (in_simdgroup ? "simdgroup" : "threadgroup") +
                          ", column by column";
                 });
  if (is_empty) return x;
  SylvesterParams params{0, grid_side(rows), grid_side(columns), is_root};
  gpu::record(x, [&](gpu::Recording& recording) {
    const auto m = static_cast<double>(rows), n = static_cast<double>(columns);
    const gpu::Work each{4 * (is_root ? m * m * m / 3 : m * n * (m + n)), 8 * (m * m + n * n + 2 * m * n)};
    gpu::in_pieces(recording, s.batch, each, [&](const gpu::Piece& piece) {
      params.matrices = grid_side(piece.count);
      recording.kernel(in_simdgroup ? "sylvester_simd" : "sylvester_block").buffer(0, piece.of(a, rows * rows));
      recording.buffer(1, piece.of(b, columns * columns)).buffer(2, piece.of(c, rows * columns));
      recording.buffer(3, piece.of(x, rows * columns)).bytes(4, params);
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({params.matrices}, {in_simdgroup ? 32u : SYLVESTER_THREADS});
    });
  });
  return x;
}

Tensor sylvester_triangular(const Tensor& a, const Tensor& b, const Tensor& c) {
  const MatrixShape first = check_square_of_numbers("sylvester_triangular", a),
                    second = check_square_of_numbers("sylvester_triangular", b);
  for (const Tensor* tensor : {&a, &b, &c})
    check(is_complex(*tensor), "metalcore::sylvester_triangular: matrices must be complex64");
  check(c.dim() >= 2 && c.size(-1) == first.rows && c.size(-2) == second.rows &&
            c.numel() == first.batch * first.rows * second.rows && first.batch == second.batch,
        "metalcore::sylvester_triangular: A, B and C must be (*, m, m), (*, n, n) and (*, n, m)");
  return solve_columns("sylvester_triangular", as_contiguous(a), as_contiguous(b), as_contiguous(c), false);
}

Tensor square_root_triangular(const Tensor& input) {
  check_square_of_numbers("square_root_triangular", input);
  check(is_complex(input), "metalcore::square_root_triangular: C must be complex64");
  const Tensor c = as_contiguous(input);
  return solve_columns("square_root_triangular", c, c, c, true);
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("matrix_exp(Tensor A) -> Tensor");
  m.def("matrix_exp_scaled(Tensor A) -> Tensor");
  m.def("sylvester_triangular(Tensor A, Tensor B, Tensor C) -> Tensor");
  m.def("square_root_triangular(Tensor C) -> Tensor");
  m.def("logarithm_triangular(Tensor T) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::matrix_exp>("matrix_exp");
  m.impl<&metalcore::sylvester_triangular>("sylvester_triangular");
  m.impl<&metalcore::square_root_triangular>("square_root_triangular");
}

// sylvester_triangular(A, B, C) -> X: A X + X B = C for upper triangular A and B. square_root_triangular(C) -> X: X X =
// C for upper triangular C. logarithm_triangular(T) -> X is made of the latter (metalcore/linalg/_logm.py). All are
// contiguous batches of complex64 matrices that are stored column by column: the arguments and results are transposes.
#include "../../../kernels/linalg/sylvester.h"

#include "../../gpu/cost.h"
#include "../../gpu/limits.h"
#include "matrices.h"

#include <string>

namespace metalcore {
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
  m.def("sylvester_triangular(Tensor A, Tensor B, Tensor C) -> Tensor");
  m.def("square_root_triangular(Tensor C) -> Tensor");
  m.def("logarithm_triangular(Tensor T) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::sylvester_triangular>("sylvester_triangular");
  m.impl<&metalcore::square_root_triangular>("square_root_triangular");
}

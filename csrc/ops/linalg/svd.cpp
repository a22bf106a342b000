// svd(A, full_matrices, compute_uv) -> (U, S, Vh): the singular value decomposition of matrices of any strides,
// float32 or complex64. Results are row-major.
#include "../../../kernels/linalg/spectral.h"

#include "../../gpu/cost.h"
#include "cpu_route.h"
#include "jacobi.h"
#include "matrices.h"
#include "qr.h"
#include "svd_polar.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

namespace metalcore {
namespace {

using Results = std::tuple<Tensor, Tensor, Tensor>;

// The shape of A, m x n, and of the tall matrix that is factored: A itself, or its transpose where A is wide.
struct Shape {
  explicit Shape(const MatrixShape& a)
      : m(a.rows), n(a.columns), batch(a.batch), rows(std::max(m, n)), columns(std::min(m, n)) {}
  int64_t m, n, batch;
  int64_t rows, columns;
};

SvdMatrices contiguous_strides(int64_t rows, int64_t columns) { return {rows * columns, columns, 1}; }
SvdMatrices strides_of(const Matrices& a) { return {a.batch_stride, a.row_stride, a.column_stride}; }
SvdMatrices transposed(const SvdMatrices& a) { return {a.batch_stride, a.column_stride, a.row_stride}; }

// The tensors for the left and right singular vectors of tall matrices, and their strides. Nothing reads or writes them
// if only the values are wanted.
struct SingularVectors {
  Tensor left, right;
  SvdMatrices left_strides, right_strides;
};

// `scales` are A's scales where params.scaled is set. Elsewhere any tensor will do.
void jacobi(const JacobiPlan& plan, const Tensor& a, const Tensor& scales, SvdParams params,
            const SingularVectors& vectors, const Tensor& s, bool compute_uv) {
  const Tensor present = compute_uv ? new_tensor({params.matrices}, ScalarType::Int, a) : s;
  gpu::record(a, [&](gpu::Recording& recording) {
    const double size = a.element_size() / 4.0;  // a complex product has four real ones
    const gpu::Work each{size * size * jacobi_flops(params.rows, params.columns),
                         12.0 * size * params.rows * params.columns};
    gpu::in_pieces(recording, params.matrices, each, [&](const gpu::Piece& piece) {
      const auto optional = [&](bool wanted, const Tensor& tensor, int64_t elements_each) {
        return wanted ? piece.of(tensor, elements_each) : gpu::view_of(s);
      };
      const gpu::BufferView u = optional(compute_uv, vectors.left, params.left.batch_stride);
      const gpu::BufferView complete = optional(compute_uv, present, 1);
      params.matrices = grid_side(piece.count);
      recording.kernel(plan.kernel).buffer(0, piece.of(a, params.a.batch_stride)).buffer(1, u);
      recording.buffer(2, piece.of(s, params.columns));
      recording.buffer(3, optional(compute_uv && !plan.only_left, vectors.right, params.right.batch_stride));
      recording.buffer(4, complete).bytes(5, params).buffer(6, optional(params.scaled, scales, 1));
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({ceil_div(params.matrices, plan.matrices_per_threadgroup)}, {plan.threads});
      if (!compute_uv) return;
      recording.kernel(std::string("svd_complete") + complex_suffix(a))
          .buffer(0, u)
          .buffer(1, complete)
          .bytes(2, params)
          .work(0, piece.work.bytes);
      recording.dispatch_threadgroups({params.matrices}, {256});
    });
  });
}

// The factors of a tall matrix's QR decomposition that the SVD needs.
const char* qr_mode(bool full_matrices, bool compute_uv) {
  return !compute_uv ? "r" : full_matrices ? "complete" : "reduced";
}

// Writes the left singular vectors of tall matrices: Q times those of R, which are columns x columns. Further columns
// of Q stay unchanged.
void multiply_q(const Tensor& q, const Tensor& r_vectors, const SvdMatrices& r_strides, const Shape& s,
                const SingularVectors& vectors) {
  const int64_t q_columns = q.size(-1);
  SvdMultiplyParams p{.a = contiguous_strides(s.rows, q_columns),
                      .b = r_strides,
                      .out = vectors.left_strides,
                      .rows = grid_side(s.rows),
                      .inner = grid_side(s.columns),
                      .columns = grid_side(q_columns),
                      .row_tiles = grid_side(ceil_div<int64_t>(s.rows, SVD_MULTIPLY_TILE)),
                      .column_tiles = grid_side(ceil_div<int64_t>(q_columns, SVD_MULTIPLY_TILE))};
  gpu::record(q, [&](gpu::Recording& recording) {
    // Pieces are of all matrices' rows: their strides from matrix to matrix stay.
    const auto entries = static_cast<double>(s.batch * q_columns);
    gpu::in_pieces(
        recording, s.rows, {2 * entries * static_cast<double>(s.columns), 8 * entries},
        [&](const gpu::Piece& piece) {
          p.rows = grid_side(piece.count);
          p.row_tiles = grid_side(ceil_div<int64_t>(piece.count, SVD_MULTIPLY_TILE));
          recording.kernel(std::string("svd_multiply") + complex_suffix(q))
              .buffer(0, piece.of(q, q_columns))
              .buffer(1, r_vectors);
          recording.buffer(2, piece.of(vectors.left, vectors.left_strides.row_stride)).bytes(3, p);
          recording.work(piece.work.flops, piece.work.bytes);
          recording.dispatch_threadgroups({grid_side(s.batch * p.row_tiles * p.column_tiles)}, {256});
        },
        SVD_MULTIPLY_TILE);
  });
}

// The left singular vectors of R = U S Vh, given Vh. R Vhᴴ = U S has orthogonal columns, and a QR decomposition makes
// unit vectors of them that are orthogonal also where singular values are small. Its R is S with signs.
Tensor from_right_vectors(const Tensor& r, const Tensor& vh) {
  const Tensor adjoint = call_torch<1>("aten::conj_physical", "", metalcore::transposed(vh))[0];
  const auto [vectors, signed_values] = qr(call_torch<1>("aten::matmul", "", r, adjoint)[0], "reduced");
  const Tensor diagonal = call_torch<1>("aten::diagonal", "", signed_values, int64_t{0}, int64_t{-2}, int64_t{-1})[0];
  const Tensor real = call_torch<1>("aten::real", "", diagonal)[0];
  Tensor ones = new_tensor(real.sizes(), ScalarType::Float, real);
  torch::stable::fill_(ones, 1.0);
  const Tensor signs = call_torch<1>("aten::copysign", "Tensor", ones, real)[0];
  const Tensor row = call_torch<1>("aten::unsqueeze", "", signs, int64_t{-2})[0];
  return as_contiguous(call_torch<1>("aten::mul", "Tensor", vectors, row)[0]);
}

// Factors tall matrices as A = Q R, and then Rᵀ, whose columns are nearer to orthogonal than R's (Drmač and Veselić
// 2008).
void after_qr(const JacobiPlan& plan, const Tensor& tall, const Shape& s, const SingularVectors& vectors,
              const Tensor& values, bool full_matrices, bool compute_uv) {
  const auto [a, scales] = scaled(tall);
  const auto [q, r] = qr(a, qr_mode(full_matrices, compute_uv));
  const bool with_small = compute_uv && !plan.only_left;
  Tensor small = new_tensor({with_small ? s.batch : 0, s.columns, s.columns}, tall.scalar_type(), tall);
  SvdMatrices r_transposed = transposed(contiguous_strides(s.columns, s.columns));
  r_transposed.batch_stride = r.size(-2) * s.columns;
  jacobi(plan, r, scales,
         {.a = r_transposed,
          .left = transposed(vectors.right_strides),
          .right = transposed(contiguous_strides(s.columns, s.columns)),
          .matrices = grid_side(s.batch),
          .rows = grid_side(s.columns),
          .columns = grid_side(s.columns),
          .scaled = 1},
         {vectors.right, small, {}, {}}, values, compute_uv);
  if (compute_uv && plan.only_left)
    small = from_right_vectors(torch::stable::narrow(const_cast<Tensor&>(r), -2, 0, s.columns),
                               s.m < s.n ? metalcore::transposed(vectors.right) : vectors.right);
  if (compute_uv) multiply_q(q, small, contiguous_strides(s.columns, s.columns), s, vectors);
}

// Threadgroups of the kernels that put columns in order.
struct OrderGrids {
  explicit OrderGrids(const Shape& s)
      : exponents(grid_side(s.batch * ceil_div<int64_t>(s.columns, 32))),
        order(grid_side(s.batch * ceil_div<int64_t>(s.columns, SVD_ORDER_THREADS))),
        permute(grid_side(s.batch * ceil_div<int64_t>(s.rows, SVD_ORDER_THREADS / 32))) {}
  uint32_t exponents, order, permute;
};

// Tall matrices times their scales, with columns by descending magnitude. Entry i of `order` says which column of the
// given matrix column i is.
struct Ordered {
  Tensor a, order, scales;
};
Ordered by_magnitude(const Tensor& tall, const Shape& s) {
  const Matrices a = matrices(tall);
  const Tensor exponents = new_tensor({s.batch, s.columns}, ScalarType::Int, tall), order = new_like(exponents);
  const Tensor scales = new_tensor({s.batch}, ScalarType::Float, tall);
  const Tensor ordered = new_tensor(batch_sizes(tall, {s.rows, s.columns}), ScalarType::Float, tall);
  const SvdOrderParams p{strides_of(a), grid_side(s.batch), grid_side(s.rows), grid_side(s.columns)};
  const OrderGrids grids(s);
  gpu::record(tall, [&](gpu::Recording& recording) {
    recording.kernel("svd_exponents").buffer(0, a.tensor).buffer(1, exponents).bytes(2, p);
    recording.dispatch_threadgroups({grids.exponents}, {SVD_ORDER_THREADS});
    recording.kernel("svd_order").buffer(0, exponents).buffer(1, order).buffer(2, scales).bytes(3, p);
    recording.dispatch_threadgroups({grids.order}, {SVD_ORDER_THREADS});
    recording.kernel("svd_permute")
        .buffer(0, a.tensor)
        .buffer(1, order)
        .buffer(2, ordered)
        .buffer(3, scales)
        .bytes(4, p);
    recording.dispatch_threadgroups({grids.permute}, {SVD_ORDER_THREADS});
  });
  return {ordered, order, scales};
}

// Does the same in blocks of columns, after it has put A's columns in descending order.
void jacobi_blocked(const Tensor& tall, const Shape& s, const SingularVectors& vectors, const Tensor& values,
                    bool full_matrices, bool compute_uv) {
  const auto [a, order, scales] = by_magnitude(tall, s);
  const auto [q, r] = qr(a, qr_mode(full_matrices, compute_uv));
  const bool wide = s.m < s.n;
  const Tensor left = new_tensor({compute_uv ? s.batch : 0, s.columns, s.columns}, ScalarType::Float, tall);
  const Tensor right = wide && compute_uv ? new_like(vectors.right) : vectors.right;
  Tensor rows = r;
  const Tensor square = as_contiguous(torch::stable::narrow(rows, -2, 0, s.columns));
  svd_jacobi_blocked(square, s.batch, compute_uv, order, scales, values, right, left);
  if (!compute_uv) return;
  if (wide) {
    Tensor transposed_right = vectors.right;
    torch::stable::copy_(transposed_right, metalcore::transposed(right));
  }
  multiply_q(q, left, transposed(contiguous_strides(s.columns, s.columns)), s, vectors);
}

void by_polar_decomposition(const Tensor& tall, const Shape& s, const SingularVectors& vectors, const Tensor& values,
                            bool full_matrices, bool compute_uv) {
  const bool wide = s.m<s.n, after_qr = s.rows> s.columns;
  const auto [a, scales] = scaled(tall);
  Tensor q = a, square = a;
  if (after_qr) {
    auto [orthogonal, r] = qr(a, qr_mode(full_matrices, compute_uv));
    q = orthogonal;
    square = as_contiguous(torch::stable::narrow(r, -2, 0, s.columns));
  }
  const SvdMatrices small = contiguous_strides(s.columns, s.columns);
  const int64_t vectors_batch = compute_uv ? s.batch : 0;
  PolarResults results{.values = values,
                       .left = vectors.left,
                       .left_row = vectors.left_strides.row_stride,
                       .left_column = vectors.left_strides.column_stride,
                       .right = vectors.right};
  if (after_qr) {
    results.left = new_tensor({vectors_batch, s.columns, s.columns}, ScalarType::Float, tall);
    results.left_row = small.row_stride, results.left_column = small.column_stride;
  }
  if (!wide) results.right = new_like(vectors.right);
  svd_polar(square, s.batch, s.columns, scales, compute_uv, results);
  if (!compute_uv) return;
  if (!wide) {
    Tensor rows = vectors.right;
    torch::stable::copy_(rows, metalcore::transposed(results.right));
  }
  if (after_qr) multiply_q(q, results.left, small, s, vectors);
}

JacobiPlan plan_of(const Shape& s, bool full_matrices, bool compute_uv, const Tensor& input) {
  const bool complex = is_complex(input);
  JacobiPlan plan = plan_svd(s.m, s.n, s.batch, full_matrices, compute_uv, complex, jacobi_tuning(input));
  if (!complex || !plan.after_qr) return plan;
  const int64_t q_columns = !compute_uv ? 0 : full_matrices ? s.rows : s.columns;
  const bool held = !is_left(plan_qr(s.rows, s.columns, s.batch, q_columns, true, qr_tuning(input)).variant);
  return held ? plan : too_large_plan(times(s.m, s.n));
}

}  // namespace

Results svd(const Tensor& input, bool full_matrices, bool compute_uv) {
  const Shape s(check_matrices_of_numbers("svd", input));
  const JacobiPlan plan = plan_of(s, full_matrices, compute_uv, input);
  gpu::note_plan("svd", name_of(plan.variant), [&] { return plan.why; });
  if (plan.variant == JacobiVariant::torch) {
    auto [u, values, vh] = call_torch<3>("aten::_linalg_svd", "", input, full_matrices, compute_uv, std::nullopt);
    return {as_contiguous(u), values, as_contiguous(vh)};
  }
  if (plan.variant == JacobiVariant::cpu) {
    auto [u, values, vh] =
        decompose_on_cpu<3>("aten::_linalg_svd", input, Entries::all, full_matrices, compute_uv, std::nullopt);
    return {u, values, vh};
  }

  const int64_t k = s.columns, u_columns = full_matrices ? s.m : k, vh_rows = full_matrices ? s.n : k;
  auto result = [&](std::vector<int64_t> sizes) { return new_tensor(sizes, input.scalar_type(), input); };
  const Tensor u = result(compute_uv ? batch_sizes(input, {s.m, u_columns}) : std::vector<int64_t>{0});
  const Tensor vh = result(compute_uv ? batch_sizes(input, {vh_rows, s.n}) : std::vector<int64_t>{0});
  const Tensor values = new_tensor(batch_sizes(input, {k}), ScalarType::Float, input);
  if (plan.variant == JacobiVariant::empty) {  // one side may be an identity
    for (const Tensor& vectors : {u, vh})
      if (vectors.numel() > 0)
        gpu::record(vectors, [&](gpu::Recording& recording) {
          set_identity(recording, {vectors, grid_side(vectors.size(-2)), grid_side(vectors.size(-1))});
        });
    return {u, values, vh};
  }
  // A wide A is factored as its transpose: Aᵀ = V S Uᵀ.
  const bool wide = s.m < s.n;
  const SvdMatrices u_strides = contiguous_strides(s.m, u_columns), vh_strides = contiguous_strides(vh_rows, s.n);
  const SingularVectors vectors = wide ? SingularVectors{vh, u, transposed(vh_strides), transposed(u_strides)}
                                       : SingularVectors{u, vh, u_strides, vh_strides};
  if (plan.variant == JacobiVariant::blocked) {
    jacobi_blocked(wide ? transposed(input) : input, s, vectors, values, full_matrices, compute_uv);
  } else if (plan.variant == JacobiVariant::polar) {
    by_polar_decomposition(wide ? transposed(input) : input, s, vectors, values, full_matrices, compute_uv);
  } else if (plan.after_qr) {
    after_qr(plan, wide ? transposed(input) : input, s, vectors, values, full_matrices, compute_uv);
  } else {
    const Matrices a = matrices(input);
    jacobi(plan, a.tensor, a.tensor,
           {.a = wide ? transposed(strides_of(a)) : strides_of(a),
            .left = vectors.left_strides,
            .right = vectors.right_strides,
            .matrices = grid_side(s.batch),
            .rows = grid_side(s.rows),
            .columns = grid_side(k),
            .scaled = 0},
           vectors, values, compute_uv);
  }
  return {u, values, vh};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("svd(Tensor A, bool full_matrices, bool compute_uv) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::svd>("svd"); }

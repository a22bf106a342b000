#include "svd_polar.h"

#include "../../../kernels/linalg/spectral.h"

#include "../gemm/gemm.h"
#include "jacobi.h"
#include "matrices.h"
#include "qr.h"

#include <cmath>
#include <vector>

namespace metalcore {
namespace {

// A step x = (b / c) x + (a - b / c) x (I + c xᵀ x)⁻¹ of the dynamically weighted Halley iteration (Nakatsukasa, Bai
// and Gygi 2010).
struct HalleyStep {
  double a, b, c;
};

// The best step for singular values between `least` and 1.
HalleyStep best_step(double least) {
  const double square = least * least;
  const double root = std::sqrt(1 + std::cbrt(4 * (1 - square) / (square * square)));
  const double a = root + 0.5 * std::sqrt(8 - 4 * (root * root - 1) + 8 * (2 - square) / (square * root));
  const double b = (a - 1) * (a - 1) / 4;
  return {a, b, a + b - 1};
}

// About the condition number of I + c xᵀ x, which a step's error is multiplied by. On an H200, 2048 x 2048 matrices of
// rank 1024 have a residual of 93 eps |A| with 90 and of 203 eps |A| with 400 (Frobenius), which saves two of ten
// steps.
constexpr double kMostWeight = 90;

// The steps that bring singular values between `least` and 1 to 1, up to rounding.
std::vector<HalleyStep> halley_steps(double least) {
  constexpr double kRounding = 1e-7;
  double from = 1e-3;  // the least value whose best step has no larger weight
  while (best_step(from).c > kMostWeight) from *= 1.01;
  std::vector<HalleyStep> steps;
  while (1 - least > kRounding) {
    const HalleyStep step = best_step(std::max(least, from));
    steps.push_back(step);
    const double square = least * least;
    least *= (step.a + step.b * square) / (1 + step.c * square);
  }
  return steps;
}

class Polar {
 public:
  Polar(const Tensor& a, int64_t batch, int64_t n)
      : params_{.row_stride = n, .column_stride = 1, .matrices = grid_side(batch), .size = grid_side(n)},
        a_(a),
        x_(matrices_like(a)),
        norms_(new_tensor({batch}, ScalarType::Float, a)) {
    const Tensor squares = new_tensor({batch, POLAR_PARTS}, ScalarType::Float, a);
    gpu::record(a, [&](gpu::Recording& recording) {
      recording.kernel("polar_squares").buffer(0, a).buffer(1, squares).bytes(2, params_);
      recording.dispatch_threadgroups({POLAR_PARTS, params_.matrices}, {POLAR_THREADS});
      recording.kernel("polar_begin").buffer(0, a).buffer(1, squares).buffer(2, x_).buffer(3, norms_);
      recording.bytes(4, params_).dispatch_threadgroups({POLAR_PARTS, params_.matrices}, {POLAR_THREADS});
    });
    iterate();
  }

  const Tensor& x() const { return x_; }

  // H = xᵀ a. Only one of its triangles is of use.
  Tensor hermitian() const { return product(transposed(x_), a_); }

  Tensor product(const Tensor& left, const Tensor& right) const {
    const Tensor result = matrices_like(a_);
    matmul_into(result, left, right, std::nullopt, std::nullopt, 0, 1.0, 0.0);
    return result;
  }

  // The singular values, and the right singular vectors as columns.
  void order(const Tensor& eigenvalues, const Tensor& eigenvectors, const Tensor& scales, const Tensor& values,
             const Tensor& right, bool compute_uv) const {
    by_rows("polar_order", compute_uv ? params_.size : 1, [&](gpu::Recording& recording) {
      recording.buffer(0, eigenvalues).buffer(1, compute_uv ? eigenvectors : a_).buffer(2, scales).buffer(3, norms_);
      recording.buffer(4, values).buffer(5, compute_uv ? right : x_).bytes(6, params_);
    });
  }

  // Writes q with the signs of r's diagonal.
  void signs(const Tensor& q, const Tensor& r, const PolarResults& results) const {
    PolarParams p = params_;
    p.row_stride = results.left_row, p.column_stride = results.left_column;
    by_rows("polar_signs", p.size, [&](gpu::Recording& recording) {
      recording.buffer(0, q).buffer(1, r).buffer(2, results.left).bytes(3, p);
    });
  }

 private:
  Tensor matrices_like(const Tensor& like) const {
    return new_tensor({int64_t{params_.matrices}, int64_t{params_.size}, int64_t{params_.size}}, ScalarType::Float,
                      like);
  }

  template <typename Arguments>
  void by_rows(const char* kernel, uint32_t rows, const Arguments& arguments) const {
    gpu::record(a_, [&](gpu::Recording& recording) {
      recording.kernel(kernel);
      arguments(recording);
      recording.dispatch_threadgroups({rows, params_.matrices}, {POLAR_THREADS});
    });
  }

  void iterate() const {
    const int64_t n = params_.size;
    const Tensor identity = matrices_like(a_), z = matrices_like(a_);
    gpu::record(a_,
                [&](gpu::Recording& recording) { set_identity(recording, {identity, params_.size, params_.size}); });
    // The norm that x was divided by is up to √n times the largest singular value.
    const double least = std::exp2(-25) / std::sqrt(static_cast<double>(n));
    for (const HalleyStep& step : halley_steps(least)) {
      SyrkParams p{.a_batch = n * n, .a_row = 1, .a_column = n, .c_batch = n * n, .c_row = n, .c_column = 1};
      p.result_batch = n * n, p.result_row = n;
      p.n = params_.size, p.k = params_.size;
      p.as_float4 = n % 4 == 0;
      p.lower = SYRK_WRITE, p.upper = SYRK_LEAVE;
      p.alpha = static_cast<float>(step.c), p.beta = 1.0f;
      gpu::record(a_, [&](gpu::Recording& recording) {
        record_syrk(recording, gpu::view_of(x_), gpu::view_of(identity), gpu::view_of(z), p, params_.matrices);
      });
      const Tensor factor = std::get<0>(cholesky_ex(z, false));
      const Tensor half_way = solve_triangular(transposed(factor), x_, true, false, false);
      const Tensor y = solve_triangular(factor, half_way, false, false, false);
      PolarParams weights = params_;
      weights.of_x = static_cast<float>(step.b / step.c);
      weights.of_y = static_cast<float>(step.a - step.b / step.c);
      by_rows("polar_step", params_.size,
              [&](gpu::Recording& recording) { recording.buffer(0, x_).buffer(1, y).bytes(2, weights); });
    }
  }

  PolarParams params_;
  Tensor a_, x_, norms_;
};

}  // namespace

void svd_polar(const Tensor& a, int64_t batch, int64_t n, const Tensor& scales, bool compute_uv,
               const PolarResults& results) {
  const Polar polar(a, batch, n);
  const auto [eigenvalues, eigenvectors] = eigh(polar.hermitian(), "L", compute_uv);
  polar.order(eigenvalues, eigenvectors, scales, results.values, results.right, compute_uv);
  if (!compute_uv) return;
  const auto [q, r] = qr(polar.product(polar.x(), results.right), "reduced");
  polar.signs(q, r, results);
}

}  // namespace metalcore

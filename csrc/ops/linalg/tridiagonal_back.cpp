// The back-transformation of tridiagonal matrices' eigenvectors, by products of matrices: blocks of reflectors are
// I - Vᵀ T V (Schreiber and Van Loan 1989), whose rows of V are reflectors.
#include "tridiagonal.h"

#include "../../../kernels/linalg/qr.h"
#include "../../../kernels/linalg/tridiagonalize.h"

#include "../gemm/gemm.h"
#include "matrices.h"

#include <vector>

namespace metalcore {
namespace {

Tensor rows_of(Tensor a, int64_t first, int64_t count) { return torch::stable::narrow(a, -2, first, count); }
Tensor columns_of(Tensor a, int64_t first, int64_t count) { return torch::stable::narrow(a, -1, first, count); }

void multiply(const Tensor& result, const Tensor& a, const Tensor& b, double alpha) {
  matmul_into(result, a, b, std::nullopt, std::nullopt, 0, alpha, 0.0);
}

// T of blocks of `width` reflectors, (blocks, width, width).
Tensor block_factors(const Tridiagonal& t, int64_t width) {
  const int64_t pitch = t.reflectors.size(-1), count = t.tau.numel();
  int64_t size = REFLECTORS_WIDE, blocks = count / size;
  const auto floats = [&](int64_t batch, int64_t side) {
    return new_tensor({batch, side, side}, ScalarType::Float, t.tau);
  };
  const auto grouped = [&](int64_t groups) {
    const int64_t sizes[] = {groups, count / groups, pitch};
    return in_shape(t.reflectors, {sizes, 3});
  };
  const Tensor grams = floats(blocks, size), v = grouped(blocks);
  multiply(grams, v, transposed(v), 1.0);
  Tensor factors = floats(blocks, size);
  gpu::record(t.tau, [&](gpu::Recording& recording) {
    recording.kernel("reflectors_factor_64").buffer(0, grams).buffer(1, t.tau).buffer(2, factors);
    const uint32_t columns = REFLECTORS_WIDE;
    recording.bytes(3, ReflectorsFactorParams{1, 0, columns, grid_side(blocks), grid_side(count), 1, columns});
    recording.dispatch_threadgroups({grid_side(blocks)}, {REFLECTORS_THREADS});
  });
  // T = (T₁, -T₁ V₁ V₂ᵀ T₂; 0, T₂) of neighbours.
  for (; size < width; size *= 2) {
    blocks /= 2;
    const Tensor pairs = grouped(blocks), gram = floats(blocks, size), product = floats(blocks, size);
    multiply(gram, rows_of(pairs, 0, size), transposed(rows_of(pairs, size, size)), 1.0);
    const int64_t stacked[] = {blocks, 2 * size, size};
    const Tensor both = in_shape(factors, {stacked, 3});
    const Tensor first = rows_of(both, 0, size), second = rows_of(both, size, size);
    multiply(product, gram, second, 1.0);
    multiply(gram, first, product, -1.0);
    Tensor joined = floats(blocks, 2 * size);
    torch::stable::zero_(joined);
    const auto put = [&](const Tensor& part, int64_t row, int64_t column) {
      Tensor to = columns_of(rows_of(joined, row, size), column, size);
      torch::stable::copy_(to, part);
    };
    put(first, 0, 0), put(gram, 0, size), put(second, size, size);
    factors = joined;
  }
  return factors;
}

// Multiplies q (batch, rows, columns), contiguous, by the product of real reflectors from the left, in place.
void apply_real_reflectors(const Tridiagonal& t, const Tensor& q) {
  const int64_t batch = q.size(0), rows = q.size(-2);
  const int64_t width = reflector_block(rows), blocks = t.reflectors.size(-2) / width;
  const int64_t sizes[] = {batch, blocks, width, width};
  const Tensor factors = in_shape(block_factors(t, width), {sizes, 4});
  const auto product = [&] { return new_tensor({batch, width, q.size(-1)}, ScalarType::Float, q); };
  const Tensor products[2] = {product(), product()};
  for (int64_t block = blocks - 1; block >= 0; --block) {
    // A block leaves the rows before its own as they are. Those of a batch are not contiguous without them.
    const int64_t first = batch == 1 ? block * width : 0, remaining = rows - first;
    const Tensor v = columns_of(rows_of(t.reflectors, block * width, width), first, remaining);
    const Tensor changed = rows_of(q, first, remaining);
    multiply(products[0], v, changed, 1.0);
    multiply(products[1], torch::stable::select(factors, 1, block), products[0], 1.0);
    matmul_into(changed, transposed(v), products[1], std::nullopt, changed, 0, -1.0, 1.0);
  }
}

}  // namespace

Tensor apply_reflectors(const Tridiagonal& t, const Tensor& z) {
  if (!is_complex(t.phases)) {
    apply_real_reflectors(t, z);
    return z;
  }
  const int64_t batch = z.size(0), n = z.size(-1);
  const TridiagonalPhasesParams p{grid_side(n)};
  const gpu::Size rows{grid_side(batch * n)}, threads{TRIDIAGONAL_PHASES_THREADS};
  const Tensor parts = new_tensor({batch, 2 * n, n}, ScalarType::Float, z);
  gpu::record(z, [&](gpu::Recording& recording) {
    recording.kernel("tridiagonal_turn").buffer(0, z).buffer(1, t.phases).buffer(2, parts).bytes(3, p);
    recording.dispatch_threadgroups(rows, threads);
  });
  apply_real_reflectors(t, parts);
  const Tensor q = new_tensor({batch, n, n}, ScalarType::ComplexFloat, z);
  gpu::record(z, [&](gpu::Recording& recording) {
    recording.kernel("tridiagonal_join").buffer(0, parts).buffer(1, q).bytes(2, p);
    recording.dispatch_threadgroups(rows, threads);
  });
  return q;
}

void unscale(const Tensor& eigenvalues, const Tensor& scales) {
  const uint32_t size = grid_side(eigenvalues.size(-1)), count = grid_side(eigenvalues.numel());
  gpu::record(eigenvalues, [&](gpu::Recording& recording) {
    recording.kernel("tridiagonal_unscale").buffer(0, eigenvalues).buffer(1, scales).bytes(2, size);
    recording.dispatch_threads({count}, {TRIDIAGONALIZE_THREADS});
  });
}

}  // namespace metalcore

// joined_linear(x, a, b, c, …): the products of one row and up to three matrices, in one dispatch.
#include "../../../kernels/gemm/gemm.h"

#include "../../gpu/tuning.h"
#include "../common/common.h"
#include "gemm.h"

#include <algorithm>
#include <array>
#include <string>

namespace metalcore {
namespace {

struct JoinedTuning {
  const char* family;
  gpu::Count fill_simdgroups = gpu::per_core(gpu::kFilling);  // that a GPU needs to be busy
};
const gpu::Table<JoinedTuning> joined_tuning("joined_linear",
                                             {{"fill_simdgroups", &JoinedTuning::fill_simdgroups, {1, 1 << 16}}},
                                             {{.family = "baseline"},
                                              {.family = "hopper", .fill_simdgroups = 4096},
                                              {.family = "simulator", .fill_simdgroups = 1024}});

constexpr int64_t kLeastTerms = 384;  // of a simdgroup

using Matrices = std::array<MaybeTensor, JOINED_MATRICES>;

void check_matrices(const char* op, const Tensor& x, const Matrices& matrices, const Matrices& biases, bool gated) {
  constexpr const char* kNames[] = {"a", "b", "c"};
  constexpr const char* kBiases[] = {"bias_a", "bias_b", "bias_c"};
  check(!gated || (matrices[1] && !matrices[2]), "metalcore::", op, ": a gate goes with two matrices");
  for (size_t m = 0; m < matrices.size(); ++m) {
    if (!matrices[m]) {
      check(!biases[m], "metalcore::", op, ": ", kBiases[m], " goes with a matrix ", kNames[m]);
      check(m + 1 == matrices.size() || !matrices[m + 1], "metalcore::", op, ": there is no matrix ", kNames[m]);
      continue;
    }
    const Tensor& matrix = *matrices[m];
    check_same_dtype(op, kNames[m], matrix, x);
    check_same_device(op, kNames[m], matrix, x);
    check(matrix.dim() == 2 && matrix.size(1) == x.size(-1) && matrix.size(0) > 0, "metalcore::", op, ": ", kNames[m],
          " of shape ", shape_text(matrix), " does not go with x of shape ", shape_text(x));
    check(!gated || matrix.size(0) == matrices[0]->size(0), "metalcore::", op, ": a and b must have one shape");
    if (!biases[m]) continue;
    check_same_dtype(op, kBiases[m], *biases[m], x);
    check_same_device(op, kBiases[m], *biases[m], x);
    check(biases[m]->dim() == 1 && biases[m]->size(0) == matrix.size(0), "metalcore::", op, ": ", kBiases[m],
          " must have shape [", matrix.size(0), "], not ", shape_text(*biases[m]));
  }
}

// Whether 16 bytes can be read at a time, along each column.
bool has_packs(const Tensor& tensor) {
  const int64_t pack = 16 / static_cast<int64_t>(tensor.element_size());
  return begins_aligned(tensor) && tensor.size(-1) % pack == 0 && (tensor.dim() < 2 || tensor.stride(0) % pack == 0);
}

// Matrices of columns whose terms lie next to each other.
MaybeTensor with_columns(const MaybeTensor& matrix) {
  return matrix && matrix->stride(1) != 1 ? MaybeTensor(torch::stable::contiguous(*matrix)) : matrix;
}

Tensor joined_linear(const Tensor& x_, const Tensor& a, const MaybeTensor& b, const MaybeTensor& c,
                     const MaybeTensor& bias_a, const MaybeTensor& bias_b, const MaybeTensor& bias_c,
                     const MaybeTensor& norm_, double eps, double offset, const MaybeTensor& residual_,
                     const std::string& gate) {
  const char* const op = "joined_linear";
  check_float(op, "x", x_);
  check(x_.dim() > 0 && x_.size(-1) > 0 && x_.numel() == x_.size(-1), "metalcore::", op, ": x must be one row, and is ",
        shape_text(x_));
  const uint32_t number = activation_number(op, gate);
  check_matrices(op, x_, {a, b, c}, {bias_a, bias_b, bias_c}, number != 0);
  const Matrices matrices = {with_columns(a), with_columns(b), with_columns(c)};
  const Matrices biases = {as_contiguous(bias_a), as_contiguous(bias_b), as_contiguous(bias_c)};
  const Tensor x = as_contiguous(x_);
  const int64_t terms = x.size(-1);
  if (norm_) {
    check_same_dtype(op, "norm", *norm_, x);
    check_same_device(op, "norm", *norm_, x);
    check(norm_->dim() == 1 && norm_->size(0) == terms, "metalcore::", op, ": norm must have shape [", terms, "], not ",
          shape_text(*norm_));
  }
  const MaybeTensor norm = as_contiguous(norm_), residual = as_contiguous(residual_);

  JoinedParams params{.terms = grid_side(terms),
                      .packs = has_packs(x) && (!norm || begins_aligned(*norm)),
                      .gate = number,
                      .has_residual = residual.has_value(),
                      .eps = static_cast<float>(eps),
                      .offset = static_cast<float>(offset)};
  int64_t columns = 0, sets = 0;
  for (size_t m = 0; m < matrices.size() && matrices[m]; ++m) {
    const int64_t own = matrices[m]->size(0);
    params.strides[m] = matrices[m]->stride(0);
    params.columns[m] = grid_side(own);
    params.has_bias[m] = biases[m].has_value();
    params.packs = params.packs && has_packs(*matrices[m]);
    columns += own, sets += ceil_div<int64_t>(own, JOINED_LINES);
  }
  if (number) columns = sets = params.columns[0];
  const uint32_t fill = joined_tuning(x).fill_simdgroups;
  params.share = 1;
  while (params.share < JOINED_SIMDGROUPS && sets * params.share < fill && terms > kLeastTerms * params.share)
    params.share *= 2;
  const uint32_t simdgroups = std::max<uint32_t>(params.share, JOINED_SIMDGROUPS / 2);

  std::vector<int64_t> shape(x_.sizes().begin(), x_.sizes().end());
  shape.back() = columns;
  const Tensor result = new_tensor({shape.data(), shape.size()}, x.scalar_type(), x);
  if (residual) {
    check_same_dtype(op, "residual", *residual, x);
    check_same_device(op, "residual", *residual, x);
    check_same_shape(op, "residual", *residual, result);
  }
  gpu::note_plan(op, "joined_linear", [&] {
    return std::to_string(params.share) + " simdgroups share the terms of " + std::to_string(JOINED_LINES) + " columns";
  });
  gpu::record(result, [&](gpu::Recording& recording) {
    recording.kernel(norm ? "joined_linear_norm_" : "joined_linear_", suffix(x.scalar_type())).buffer(0, x);
    for (uint32_t m = 0; m < JOINED_MATRICES; ++m) recording.buffer(1 + m, matrices[m]).buffer(4 + m, biases[m]);
    recording.buffer(7, norm).buffer(8, residual).buffer(9, result).bytes(10, params);
    const double read = static_cast<double>(terms * (number ? 2 * columns : columns));
    recording.work(2 * read, read * static_cast<double>(x.element_size()));
    recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(sets, simdgroups / params.share))}, {32 * simdgroups});
  });
  return result;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "joined_linear(Tensor x, Tensor a, Tensor? b, Tensor? c, Tensor? bias_a, Tensor? bias_b, Tensor? bias_c, "
      "Tensor? norm, float eps, float offset, Tensor? residual, str gate) -> Tensor");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::joined_linear>("joined_linear"); }

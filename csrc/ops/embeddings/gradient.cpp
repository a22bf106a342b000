// The gradient of a table by whose indices rows were taken, alone or in bags. Few indices are compared with each other;
// many are sorted first.
#include "embedding.h"

#include "../../../kernels/embeddings/embedding.h"
#include "../common/common.h"
#include "../common/rows.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

namespace metalcore {
namespace {

// What becomes of the gradient of a result on its way to the rows of the table. Tensors are contiguous.
struct Terms {
  Tensor grad;                               // (results …, depth)
  Tensor indices;                            // int64
  MaybeTensor bags, sizes, factors, maxima;  // of bags: the bag of each index, and as embedding_bag has them
  int64_t rows, padding;
  bool by_count;
  int64_t mode = EMBEDDING_SUM;

  int64_t depth() const { return grad.sizes()[grad.dim() - 1]; }
  double bytes() const {
    return static_cast<double>(grad.element_size()) * static_cast<double>(2 * indices.numel() * depth());
  }
};

EmbeddingGradientParams params_of(const Terms& terms, const Tensor& table) {
  const int64_t depth = terms.depth();
  return {
      .rows = terms.rows,
      .padding = terms.padding,
      .depth = grid_side(depth),
      .aligned = aligned16(terms.grad, depth, depth) && aligned16(table, depth, depth),
      .count = grid_side(terms.indices.numel()),
      .results = grid_side(terms.grad.numel() / depth),
      .mode = static_cast<uint32_t>(terms.mode),
      .in_bags = terms.bags.has_value(),
      .weighted = terms.factors.has_value(),
      .by_count = terms.by_count,
  };
}

// Every index is compared with all.
constexpr int64_t kFewIndices = 2048;

void from_few(const char* op, const Terms& terms, const Tensor& table) {
  gpu::note_plan(op, "few", [&] {
    return "a simdgroup looks for its index among " + std::to_string(terms.indices.numel()) + ", which are not sorted";
  });
  const EmbeddingGradientParams params = params_of(terms, table);
  const auto blocks = grid_side(ceil_div<int64_t>(params.depth, 4 * gpu::kSimdWidth));
  const uint32_t positions = ceil_div(params.count, EMBEDDING_POSITIONS);
  const Tensor counted = new_tensor({int64_t{params.count}}, ScalarType::Int, table);
  gpu::record(table, [&](gpu::Recording& recording) {
    recording.kernel("embedding_uses").buffer(0, terms.indices).buffer(1, counted).bytes(2, params);
    recording.dispatch_threadgroups({1, positions}, {gpu::kSimdWidth, EMBEDDING_POSITIONS});
    recording.kernel("embedding_gradient_few_", suffix(table.scalar_type())).buffer(0, terms.grad);
    recording.buffer(1, terms.indices).buffer(2, terms.bags).buffer(3, terms.sizes).buffer(4, terms.factors);
    recording.buffer(5, terms.maxima).buffer(6, table).bytes(7, params).buffer(8, counted).work(0, terms.bytes());
    recording.dispatch_threadgroups({blocks, positions}, {gpu::kSimdWidth, EMBEDDING_POSITIONS});
  });
}

// Positions that a thread walks: many of them make fewer parts of sums, few of them more threads.
constexpr int64_t kLongBlock = 32, kShortBlock = 8, kThreads = 1 << 18;

void from_sorted(const char* op, const Terms& terms, const Tensor& table) {
  const Tensor indices = terms.indices.dim() == 1 ? terms.indices : torch::stable::flatten(terms.indices);
  const auto [sorted, order] =
      call_torch<2>("aten::sort", "stable", indices, std::optional<bool>(true), int64_t{-1}, false);
  EmbeddingGradientParams params = params_of(terms, table);
  const int64_t across = ceil_div<int64_t>(params.depth, 4), count = params.count;
  const int64_t block = count * across >= kThreads * kLongBlock ? kLongBlock : kShortBlock;
  const int64_t blocks = ceil_div(count, block);
  params.block = grid_side(block);
  const Tensor parts = new_tensor({2 * blocks, params.depth}, ScalarType::Float, table);
  gpu::note_plan(op, "runs", [&] {
    return "a thread has four columns of " + std::to_string(block) +
           " sorted indices; a second dispatch has the runs of equal indices that are longer";
  });
  gpu::record(table, [&](gpu::Recording& recording) {
    recording.kernel("embedding_gradient_", suffix(table.scalar_type())).buffer(0, terms.grad).buffer(1, sorted);
    recording.buffer(2, order).buffer(3, terms.bags).buffer(4, terms.sizes).buffer(5, terms.factors);
    recording.buffer(6, terms.maxima).buffer(7, table).buffer(8, parts).bytes(9, params).work(0, terms.bytes());
    dispatch_across(recording, across, blocks);
    recording.kernel("embedding_gradient_long_", suffix(table.scalar_type())).buffer(0, parts).buffer(1, sorted);
    recording.buffer(2, table).bytes(3, params).work(0, terms.bytes());
    dispatch_across(recording, across, blocks);
  });
}

Tensor gradient(const char* op, const Terms& terms) {
  Tensor table = new_tensor({terms.rows, terms.depth()}, terms.grad.scalar_type(), terms.grad);
  torch::stable::zero_(table);
  if (terms.indices.numel() == 0 || table.numel() == 0) return table;
  (terms.indices.numel() <= kFewIndices ? from_few : from_sorted)(op, terms, table);
  return table;
}

}  // namespace

Tensor as_dtype(const Tensor& tensor, ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype);
}

Tensor embedding_backward(const Tensor& grad, const Tensor& indices, int64_t rows, int64_t padding, bool by_count) {
  const char* op = "embedding_backward";
  check_float(op, "grad", grad);
  check_same_device(op, "indices", indices, grad);
  check_integers(op, indices);
  const Sizes places = indices.sizes(), of_grad = grad.sizes();
  check(of_grad.size() == places.size() + 1 && std::equal(places.begin(), places.end(), of_grad.begin()),
        "metalcore::", op, ": grad must have the shape of indices, ", shape_text(places),
        ", and a dimension more, not ", shape_text(of_grad));
  return gradient(op, {.grad = as_contiguous(grad),
                       .indices = as_contiguous(as_dtype(indices, ScalarType::Long)),
                       .rows = rows,
                       .padding = padding,
                       .by_count = by_count});
}

Tensor embedding_bag_backward(const Tensor& grad, const Tensor& indices, const Tensor& bags, const Tensor& sizes,
                              const Tensor& maxima, const MaybeTensor& factors, int64_t rows, int64_t padding,
                              bool by_count, int64_t mode) {
  const char* op = "embedding_bag_backward";
  check_float(op, "grad", grad);
  check(grad.dim() == 2, "metalcore::", op, ": grad must have 2 dimensions, not ", grad.dim());
  check(0 <= mode && mode <= 2, "metalcore::", op, ": mode must be 0, 1 or 2, not ", mode);
  const int64_t count = indices.numel(), outer = grad.sizes()[0];
  check_long(op, "indices", indices, grad, count);
  check_long(op, "bags", bags, grad, count);
  if (mode == EMBEDDING_MEAN) check_long(op, "sizes", sizes, grad, outer);
  if (mode == EMBEDDING_MAX) check_long(op, "maxima", maxima, grad, grad.numel());
  check_factors(op, factors, grad, count);
  return gradient(op, {.grad = as_contiguous(grad),
                       .indices = as_contiguous(indices),
                       .bags = as_contiguous(bags),
                       .sizes = given_if(mode == EMBEDDING_MEAN, as_contiguous(sizes)),
                       .factors = as_contiguous(factors),
                       .maxima = given_if(mode == EMBEDDING_MAX, as_contiguous(maxima)),
                       .rows = rows,
                       .padding = padding,
                       .by_count = by_count,
                       .mode = mode});
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "embedding_backward(Tensor grad, Tensor indices, int rows, int padding_idx, bool scale_grad_by_freq) -> Tensor");
  m.def(
      "embedding_bag_backward(Tensor grad, Tensor indices, Tensor bags, Tensor sizes, Tensor maxima, "
      "Tensor? per_sample_weights, int rows, int padding_idx, bool scale_grad_by_freq, int mode) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::embedding_backward>("embedding_backward");
  m.impl<&metalcore::embedding_bag_backward>("embedding_bag_backward");
}

// PyTorch's own operators of embeddings, by the kernels of this folder. What the forward leaves for the backward is
// what PyTorch's own leaves.
#include "embedding.h"

#include "../common/replacement.h"

#include <cstdint>
#include <tuple>

namespace metalcore {
namespace {

// Whether there are kernels for the indices, beside a table or its gradient. Others are PyTorch's.
bool takes_indices(const Tensor& indices, const Tensor& beside) {
  return are_integers(indices) && indices.numel() <= INT32_MAX && same_device(indices, beside);
}

bool takes_rows(const Tensor& weight, const Tensor& indices) {
  return is_float(weight) && weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) <= INT32_MAX &&
         takes_indices(indices, weight);
}

bool takes_embedding(const Tensor& weight, const Tensor& indices, int64_t, bool, bool) {
  return takes_rows(weight, indices);
}

Replacement<&takes_embedding, &embedding> embedding_replacement("embedding", "embedding");

bool takes_gradient(const Tensor& grad, const Tensor& indices, int64_t, int64_t, bool) {
  return is_float(grad) && grad.dim() == indices.dim() + 1 && grad.sizes().back() <= INT32_MAX &&
         takes_indices(indices, grad);
}

Replacement<&takes_gradient, &embedding_backward> gradient_replacement("embedding_dense_backward",
                                                                       "embedding_backward");

// aten::_embedding_bag, and the same without a derivative

using Bags = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // results, bags of indices, sizes of bags, maxima

bool takes_bags(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool, int64_t mode, bool,
                const MaybeTensor& factors, bool last, int64_t) {
  return takes_rows(weight, indices) && indices.dim() == 1 && indices.numel() > 0 && offsets.dim() == 1 &&
         offsets.scalar_type() == indices.scalar_type() && same_device(offsets, weight) && offsets.numel() > last &&
         (!given(factors) || (mode == 0 && factors->scalar_type() == weight.scalar_type()));
}

Bags bags(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool by_count, int64_t mode, bool sparse,
          const MaybeTensor& factors, bool last, int64_t padding) {
  const ScalarType type = indices.scalar_type();
  const Tensor places = as_dtype(indices, ScalarType::Long), starts = as_dtype(offsets, ScalarType::Long);
  const auto [out, sizes, maxima] =
      embedding_bag(weight, places, starts, mode, given(factors), last, padding, by_count, sparse);
  const Tensor of_indices = embedding_bag_samples(starts, places.numel(), last);
  return {out, as_dtype(of_indices, type), as_dtype(sizes, type), as_dtype(maxima, type)};
}

// One for each operator: a replacement is known by its functions.
Bags bags_forward_only(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool by_count, int64_t mode,
                       bool sparse, const MaybeTensor& factors, bool last, int64_t padding) {
  return bags(weight, indices, offsets, by_count, mode, sparse, factors, last, padding);
}

Replacement<&takes_bags, &bags> bag_replacement("_embedding_bag", "embedding_bag");
Replacement<&takes_bags, &bags_forward_only> bag_forward_only_replacement("_embedding_bag_forward_only",
                                                                          "embedding_bag");

// aten::_embedding_bag_backward

bool takes_bag_gradient(const Tensor& grad, const Tensor& indices, const Tensor&, const Tensor& bags,
                        const Tensor& sizes, const Tensor& maxima, int64_t rows, bool by_count, int64_t mode,
                        bool sparse, const MaybeTensor& factors, int64_t) {
  return !sparse && rows > 0 && takes_rows(grad, indices) && bags.numel() == indices.numel() &&
         (mode == 0 || (mode == 1 && sizes.numel() == grad.size(0)) ||
          (mode == 2 && same_sizes(maxima, grad) && !by_count)) &&
         (!given(factors) || factors->scalar_type() == grad.scalar_type());
}

Tensor bag_gradient(const Tensor& grad, const Tensor& indices, const Tensor&, const Tensor& bags, const Tensor& sizes,
                    const Tensor& maxima, int64_t rows, bool by_count, int64_t mode, bool, const MaybeTensor& factors,
                    int64_t padding) {
  constexpr ScalarType kLong = ScalarType::Long;
  return embedding_bag_backward(grad, as_dtype(indices, kLong), as_dtype(bags, kLong), as_dtype(sizes, kLong),
                                as_dtype(maxima, kLong), given(factors), rows, padding, by_count, mode);
}

Replacement<&takes_bag_gradient, &bag_gradient> bag_gradient_replacement("_embedding_bag_backward",
                                                                         "embedding_bag_backward");

}  // namespace
}  // namespace metalcore

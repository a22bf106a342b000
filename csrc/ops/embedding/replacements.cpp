// PyTorch's own operators of embeddings, by the kernels of this folder. What the forward leaves for the backward is
// what PyTorch's own leaves.
#include "embedding.h"

#include "../replacement.h"

#include <cstdint>
#include <tuple>

namespace metalcore {
namespace {

// Whether there are kernels for the table and the indices. Other indices are PyTorch's.
bool takes_rows(const Tensor& weight, const Tensor& indices) {
  if (!is_float(weight) || weight.dim() != 2 || weight.size(0) == 0 || weight.size(1) > INT32_MAX) return false;
  const ScalarType type = indices.scalar_type();
  return (type == ScalarType::Long || type == ScalarType::Int) && indices.numel() <= INT32_MAX &&
         same_device(indices, weight);
}

bool takes_embedding(const Tensor& weight, const Tensor& indices, int64_t, bool, bool) {
  return takes_rows(weight, indices);
}

Replacement<&takes_embedding, &embedding> embedding_replacement("embedding", "embedding");

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
  const auto as = [](const Tensor& x, ScalarType wanted) {
    return x.scalar_type() == wanted ? x : torch::stable::to(x, wanted);
  };
  const Tensor places = as(indices, ScalarType::Long), starts = as(offsets, ScalarType::Long);
  const auto [out, sizes, maxima] =
      embedding_bag(weight, places, starts, mode, given(factors), last, padding, by_count, sparse);
  const Tensor of_indices = embedding_bag_samples(starts, places.numel(), last);
  return {out, as(of_indices, type), as(sizes, type), as(maxima, type)};
}

// One for each operator: a replacement is known by its functions.
Bags bags_forward_only(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool by_count, int64_t mode,
                       bool sparse, const MaybeTensor& factors, bool last, int64_t padding) {
  return bags(weight, indices, offsets, by_count, mode, sparse, factors, last, padding);
}

Replacement<&takes_bags, &bags> bag_replacement("_embedding_bag", "embedding_bag");
Replacement<&takes_bags, &bags_forward_only> bag_forward_only_replacement("_embedding_bag_forward_only",
                                                                          "embedding_bag");

}  // namespace
}  // namespace metalcore

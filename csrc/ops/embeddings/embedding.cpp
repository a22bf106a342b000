// Rows of a table by index, alone or in bags, and the gradient of bags' factors.
#include "embedding.h"

#include "../../../kernels/embeddings/embedding.h"
#include "../common/common.h"
#include "../common/rows.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

namespace metalcore {
namespace {

void check_table(const char* op, const Tensor& table) {
  check_float(op, "weight", table);
  check(table.dim() == 2, "metalcore::", op, ": weight must have 2 dimensions, not ", table.dim());
}

// sizes of `lead` and one dimension more
std::vector<int64_t> with_depth(Sizes lead, int64_t depth) {
  std::vector<int64_t> sizes(lead.begin(), lead.end());
  sizes.push_back(depth);
  return sizes;
}

}  // namespace

void check_long(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference, int64_t count) {
  check_same_device(op, argument, tensor, reference);
  check(tensor.scalar_type() == ScalarType::Long, "metalcore::", op, ": ", argument, " must be int64");
  check(tensor.numel() == count, "metalcore::", op, ": ", argument, " must have ", count, " elements, not ",
        tensor.numel());
}

bool are_integers(const Tensor& indices) {
  return indices.scalar_type() == ScalarType::Long || indices.scalar_type() == ScalarType::Int;
}

void check_integers(const char* op, const Tensor& indices) {
  check(are_integers(indices), "metalcore::", op, ": indices must be int32 or int64");
}

void check_factors(const char* op, const MaybeTensor& factors, const Tensor& reference, int64_t count) {
  if (!factors) return;
  check_same_device(op, "per_sample_weights", *factors, reference);
  check_same_dtype(op, "per_sample_weights", *factors, reference);
  check(factors->numel() == count, "metalcore::", op, ": per_sample_weights must have ", count, " elements, not ",
        factors->numel());
}

void dispatch_across(gpu::Recording& recording, int64_t across, int64_t down) {
  const auto width = static_cast<uint32_t>(std::min<int64_t>(across, 256));
  recording.dispatch_threads({grid_side(across), grid_side(down)}, {width, 256 / width});
}

Tensor embedding(const Tensor& weight, const Tensor& indices_, int64_t, bool, bool) {
  const char* op = "embedding";
  check_table(op, weight);
  check_same_device(op, "indices", indices_, weight);
  check_integers(op, indices_);
  const int64_t depth = weight.sizes()[1];
  const std::vector<int64_t> sizes = with_depth(indices_.sizes(), depth);
  const Tensor out = new_tensor(Sizes(sizes.data(), sizes.size()), weight.scalar_type(), weight);
  embedding_into(out, as_contiguous(weight), as_contiguous(indices_));
  return out;
}

void embedding_into(const Tensor& out, const Tensor& table, const Tensor& indices) {
  if (out.numel() == 0) return;
  const int64_t depth = table.sizes()[1];
  const auto item = static_cast<int64_t>(table.element_size());
  const bool vectors = aligned16(table, depth, depth) && aligned16(out, depth, depth);
  const int64_t word = vectors ? 16 : item;
  gpu::note_plan("embedding", vectors ? "16 bytes" : "elements", [&] {
    return std::string("a thread copies ") +
           (vectors ? "16 bytes" : "one element, since rows do not begin and end at multiples of 16 bytes");
  });
  gpu::record(out, [&](gpu::Recording& recording) {
    recording.kernel("embedding_", std::to_string(word)).buffer(0, table).buffer(1, indices).buffer(2, out);
    const auto bytes = static_cast<double>(2 * out.numel() * item);
    recording.bytes(3, EmbeddingParams{.rows = table.sizes()[0],
                                       .depth = grid_side(depth * item / word),
                                       .wide = indices.scalar_type() == ScalarType::Long});
    recording.work(0, bytes);
    dispatch_across(recording, depth * item / word, indices.numel());
  });
}

std::tuple<Tensor, Tensor, Tensor> embedding_bag(const Tensor& weight, const Tensor& indices_, const Tensor& offsets_,
                                                 int64_t mode, const MaybeTensor& factors_, bool include_last_offset,
                                                 int64_t padding, bool, bool) {
  const char* op = "embedding_bag";
  check_table(op, weight);
  check(0 <= mode && mode <= 2, "metalcore::", op, ": mode must be 0, 1 or 2, not ", mode);
  check_long(op, "indices", indices_, weight, indices_.numel());
  check_long(op, "offsets", offsets_, weight, offsets_.numel());
  check(!include_last_offset || offsets_.numel() > 0, "metalcore::", op, ": offsets must have the last one");
  check_factors(op, factors_, weight, indices_.numel());
  const int64_t depth = weight.sizes()[1], bags = offsets_.numel() - include_last_offset;
  const bool max_wanted = mode == EMBEDDING_MAX;
  Tensor out = new_tensor({bags, depth}, weight.scalar_type(), weight);
  Tensor sizes = new_tensor({bags}, ScalarType::Long, weight);
  const Tensor maxima = new_tensor({max_wanted ? bags : 0, depth}, ScalarType::Long, weight);
  if (bags == 0 || depth == 0 || indices_.numel() == 0 || weight.numel() == 0) {
    torch::stable::zero_(out);
    torch::stable::zero_(sizes);
    torch::stable::fill_(maxima, -1.0);
    return {out, sizes, maxima};
  }
  const Tensor table = as_contiguous(weight), indices = as_contiguous(indices_), offsets = as_contiguous(offsets_);
  const MaybeTensor factors = as_contiguous(factors_);
  const EmbeddingBagParams params{
      .rows = weight.sizes()[0],
      .padding = padding,
      .depth = grid_side(depth),
      .aligned = aligned16(table, depth, depth),
      .count = grid_side(indices.numel()),
      .bags = grid_side(bags),
      .offsets = grid_side(offsets.numel()),
      .mode = static_cast<uint32_t>(mode),
      .weighted = factors_.has_value(),
  };
  gpu::note_plan(op, "bags", [] { return std::string("a thread has 16 bytes, or four elements, of a bag's result"); });
  gpu::record(out, [&](gpu::Recording& recording) {
    recording.kernel("embedding_bag_", suffix(weight.scalar_type())).buffer(0, table).buffer(1, indices);
    recording.buffer(2, offsets).buffer(3, factors).buffer(4, out).buffer(5, sizes);
    recording.buffer(6, given_if(max_wanted, maxima)).bytes(7, params);
    const auto item = static_cast<double>(weight.element_size() * depth);
    recording.work(0, item * static_cast<double>(indices.numel() + bags));
    const int64_t each = params.aligned ? 16 / static_cast<int64_t>(weight.element_size()) : 4;  // elements of a thread
    dispatch_across(recording, ceil_div(depth, each), bags);
  });
  return {out, sizes, maxima};
}

Tensor embedding_bag_samples(const Tensor& offsets_, int64_t count, bool include_last_offset) {
  const char* op = "embedding_bag_samples";
  check_long(op, "offsets", offsets_, offsets_, offsets_.numel());
  const Tensor bags = new_tensor({count}, ScalarType::Long, offsets_);
  if (count == 0) return bags;
  const Tensor offsets = as_contiguous(offsets_);
  const int64_t number = offsets.numel() - include_last_offset;
  check(number > 0, "metalcore::", op, ": there are no bags for ", count, " indices");
  gpu::note_plan(op, "search", [] { return std::string("a thread looks for the bag of an index"); });
  gpu::record(bags, [&](gpu::Recording& recording) {
    recording.kernel("embedding_bag_samples").buffer(0, offsets).buffer(1, bags);
    recording.bytes(2, EmbeddingBagParams{.count = grid_side(count), .bags = grid_side(number)});
    recording.dispatch_threads({grid_side(count)}, {256});
  });
  return bags;
}

namespace {

// The gradient by the factors of indices, from that of bags.
Tensor embedding_bag_factors(const Tensor& grad_, const Tensor& weight, const Tensor& indices_, const Tensor& bags_,
                             int64_t padding) {
  const char* op = "embedding_bag_factors";
  check_table(op, weight);
  check_same_device(op, "grad", grad_, weight);
  check_same_dtype(op, "grad", grad_, weight);
  const int64_t depth = weight.sizes()[1], count = indices_.numel();
  check(grad_.dim() == 2 && grad_.sizes()[1] == depth, "metalcore::", op, ": grad must have the depth of weight");
  check_long(op, "indices", indices_, weight, count);
  check_long(op, "bags", bags_, weight, count);
  const Tensor gradient = new_tensor({count}, weight.scalar_type(), weight);
  if (count == 0) return gradient;
  const Tensor grad = as_contiguous(grad_), table = as_contiguous(weight), indices = as_contiguous(indices_);
  const Tensor bags = as_contiguous(bags_);
  constexpr uint32_t kPerGroup = 8;
  gpu::note_plan(op, "simd", [] { return std::string("a simdgroup has an index"); });
  gpu::record(gradient, [&](gpu::Recording& recording) {
    recording.kernel("embedding_bag_factors_", suffix(weight.scalar_type())).buffer(0, grad).buffer(1, table);
    recording.buffer(2, indices).buffer(3, bags).buffer(4, gradient);
    recording.bytes(5, EmbeddingBagParams{.rows = weight.sizes()[0],
                                          .padding = padding,
                                          .depth = grid_side(depth),
                                          .count = grid_side(count),
                                          .bags = grid_side(grad.sizes()[0])});
    recording.work(0, static_cast<double>(2 * count * depth) * static_cast<double>(weight.element_size()));
    recording.dispatch_threadgroups({ceil_div(grid_side(count), kPerGroup)}, {kPerGroup * gpu::kSimdWidth});
  });
  return gradient;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("embedding(Tensor weight, Tensor indices, int padding_idx, bool scale_grad_by_freq, bool sparse) -> Tensor");
  m.def(
      "embedding_bag(Tensor weight, Tensor indices, Tensor offsets, int mode, Tensor? per_sample_weights, "
      "bool include_last_offset, int padding_idx, bool scale_grad_by_freq, bool sparse) -> (Tensor, Tensor, Tensor)");
  m.def("embedding_bag_samples(Tensor offsets, int count, bool include_last_offset) -> Tensor");
  m.def("embedding_bag_factors(Tensor grad, Tensor weight, Tensor indices, Tensor bags, int padding_idx) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::embedding>("embedding");
  m.impl<&metalcore::embedding_bag>("embedding_bag");
  m.impl<&metalcore::embedding_bag_samples>("embedding_bag_samples");
  m.impl<&metalcore::embedding_bag_factors>("embedding_bag_factors");
}

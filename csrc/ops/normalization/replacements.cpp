// Norms in the place of PyTorch's kernels. These have one float32 mean and scale of each row or group, as ours have.
#include "../common/replacement.h"
#include "norms.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

// Which gradients are wanted. PyTorch's conversions take no std::vector<bool> to an operator.
class Mask {
 public:
  explicit Mask(std::vector<bool> wanted) : wanted_(std::move(wanted)) {}
  bool operator[](size_t i) const { return wanted_[i]; }
  size_t size() const { return wanted_.size(); }

 private:
  std::vector<bool> wanted_;
};

}  // namespace
}  // namespace metalcore

template <>
struct torch::stable::detail::ToImpl<metalcore::Mask> {
  static metalcore::Mask call(StableIValue value, uint64_t, bool) {
    return metalcore::Mask(torch::stable::detail::to<std::vector<bool>>(value));
  }
};

template <>
struct torch::stable::detail::FromImpl<metalcore::Mask> {
  static StableIValue call(const metalcore::Mask& mask, uint64_t, bool) {
    StableListHandle list = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(mask.size(), &list));
    for (size_t i = 0; i < mask.size(); ++i)
      TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, torch::stable::detail::from(mask[i])));
    return torch::stable::detail::from(list);
  }
};

namespace metalcore {
namespace {

using Shape = std::vector<int64_t>;

bool are_statistics(const Tensor& tensor, int64_t count, const Tensor& x) {
  return is_float(tensor) && tensor.scalar_type() == ScalarType::Float && tensor.numel() == count &&
         same_device(tensor, x);
}

int64_t product(Sizes sizes) {
  int64_t found = 1;
  for (const int64_t size : sizes) found *= size;
  return found;
}

int64_t rows_of(const Tensor& x, const Shape& shape) { return product({x.sizes().data(), x.dim() - shape.size()}); }

// Rows that kernels can count, of the last dimensions.
bool takes_rows(const Tensor& x, const Shape& shape) {
  const auto sizes = x.sizes();
  return is_float(x) && !shape.empty() && shape.size() <= sizes.size() &&
         std::equal(shape.begin(), shape.end(), sizes.end() - shape.size()) &&
         product({shape.data(), shape.size()}) <= INT32_MAX && rows_of(x, shape) <= UINT32_MAX;
}

// A parameter that is left out, or has x's dtype and device, and the shape.
bool takes_parameter(const MaybeTensor& parameter, const Tensor& x, const Shape& shape) {
  if (!given(parameter)) return true;
  const auto sizes = parameter->sizes();
  return is_float(*parameter) && parameter->scalar_type() == x.scalar_type() && same_device(*parameter, x) &&
         std::equal(shape.begin(), shape.end(), sizes.begin(), sizes.end());
}

// A gradient that is not wanted is an undefined tensor.
Tensor wanted(bool is, const Tensor& gradient) { return is ? gradient : Tensor(); }
// The gradient of a parameter of this shape, from a row of its elements.
Tensor wanted(bool is, const Tensor& gradient, const Shape& shape) {
  if (!is || shape.size() == 1) return wanted(is, gradient);
  Shape strides(shape.size(), 1);
  for (size_t d = shape.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(gradient.get(), static_cast<int64_t>(shape.size()),
                                                        shape.data(), strides.data(), 0, &result));
  return Tensor(result);
}

// aten::_fused_rms_norm

using MaybeEps = std::optional<double>;

bool takes_rms_norm(const Tensor& x, const Shape& shape, const MaybeTensor& weight, const MaybeEps&) {
  return takes_rows(x, shape) && takes_parameter(weight, x, shape);
}
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Shape& shape, const MaybeTensor& weight,
                                    const MaybeEps& eps) {
  return rms_norm_with_scales(x, shape.size(), given(weight), eps.value_or(std::numeric_limits<float>::epsilon()));
}

bool takes_rms_norm_backward(const Tensor& grad, const Tensor& x, const Shape& shape, const Tensor& scales,
                             const MaybeTensor& weight, const Mask& mask) {
  return are_alike(grad, x) && takes_rows(x, shape) && takes_parameter(weight, x, shape) &&
         are_statistics(scales, rows_of(x, shape), x) && (given(weight) || !mask[1]);
}
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Shape& shape,
                                             const Tensor& scales, const MaybeTensor& weight, const Mask& mask) {
  const auto [gx, gw] = rms_norm_backward_of_scales(grad, x, scales, shape.size(), given(weight), mask[1]);
  return {wanted(mask[0], gx), wanted(mask[1], gw)};
}

Replacement<&takes_rms_norm, &rms_norm> rms_norm_replacement("_fused_rms_norm", "rms_norm");
Replacement<&takes_rms_norm_backward, &rms_norm_backward> rms_norm_backward_replacement("_fused_rms_norm_backward",
                                                                                        "rms_norm_backward");

// aten::native_layer_norm

bool takes_layer_norm(const Tensor& x, const Shape& shape, const MaybeTensor& weight, const MaybeTensor& bias, double) {
  return takes_rows(x, shape) && takes_parameter(weight, x, shape) && takes_parameter(bias, x, shape);
}
std::tuple<Tensor, Tensor, Tensor> native_layer_norm(const Tensor& x, const Shape& shape, const MaybeTensor& weight,
                                                     const MaybeTensor& bias, double eps) {
  return layer_norm(x, shape.size(), given(weight), given(bias), eps);
}

bool takes_layer_norm_backward(const Tensor& grad, const Tensor& x, const Shape& shape, const Tensor& means,
                               const Tensor& scales, const MaybeTensor& weight, const MaybeTensor& bias, const Mask&) {
  return are_alike(grad, x) && takes_layer_norm(x, shape, weight, bias, 0) &&
         are_statistics(means, rows_of(x, shape), x) && are_statistics(scales, rows_of(x, shape), x);
}
std::tuple<Tensor, Tensor, Tensor> native_layer_norm_backward(const Tensor& grad, const Tensor& x, const Shape& shape,
                                                              const Tensor& means, const Tensor& scales,
                                                              const MaybeTensor& weight, const MaybeTensor&,
                                                              const Mask& mask) {
  const auto [gx, gw, gb] =
      layer_norm_backward(grad, x, means, scales, std::nullopt, shape.size(), given(weight), mask[1] || mask[2]);
  return {wanted(mask[0], gx), wanted(mask[1], gw, shape), wanted(mask[2], gb, shape)};
}

Replacement<&takes_layer_norm, &native_layer_norm> layer_norm_replacement("native_layer_norm", "layer_norm");
Replacement<&takes_layer_norm_backward, &native_layer_norm_backward> layer_norm_backward_replacement(
    "native_layer_norm_backward", "layer_norm_backward");

// aten::native_group_norm. PyTorch's kernels take channels that are neighbours in memory as they lie.

bool takes_group_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t, int64_t, int64_t,
                      int64_t groups, double) {
  if (!is_float(x) || !x.is_contiguous() || x.dim() < 2 || groups <= 0 || x.size(1) % groups != 0) return false;
  const Shape channels = {x.size(1)};
  return x.numel() > 0 && x.numel() <= INT32_MAX && takes_parameter(weight, x, channels) &&
         takes_parameter(bias, x, channels);
}
std::tuple<Tensor, Tensor, Tensor> native_group_norm(const Tensor& x, const MaybeTensor& weight,
                                                     const MaybeTensor& bias, int64_t, int64_t, int64_t, int64_t groups,
                                                     double eps) {
  return group_norm(x, groups, given(weight), given(bias), eps);
}

bool takes_group_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& means, const Tensor& scales,
                               const MaybeTensor& weight, int64_t, int64_t, int64_t, int64_t groups, const Mask&) {
  if (!are_alike(grad, x) || !takes_group_norm(x, weight, std::nullopt, 0, 0, 0, groups, 0)) return false;
  const int64_t count = x.size(0) * groups;
  return are_statistics(means, count, x) && are_statistics(scales, count, x);
}
std::tuple<Tensor, Tensor, Tensor> native_group_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& means,
                                                              const Tensor& scales, const MaybeTensor& weight, int64_t,
                                                              int64_t, int64_t, int64_t groups, const Mask& mask) {
  const auto [gx, gw, gb] = group_norm_backward(grad, x, means, scales, groups, given(weight), mask[1] || mask[2]);
  return {wanted(mask[0], gx), wanted(mask[1], gw), wanted(mask[2], gb)};
}

Replacement<&takes_group_norm, &native_group_norm> group_norm_replacement("native_group_norm", "group_norm");
Replacement<&takes_group_norm_backward, &native_group_norm_backward> group_norm_backward_replacement(
    "native_group_norm_backward", "group_norm_backward");

}  // namespace
}  // namespace metalcore

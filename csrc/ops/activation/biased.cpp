// activation(x + bias), with a bias along the last dimension.
#include "../../../kernels/activation/activation.h"
#include "../normalization/norms.h"
#include "../common/rows.h"
#include "activation.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

int64_t check_biased(const char* op, const Tensor& x, const Tensor& bias, const std::string& activation) {
  check_float(op, "x", x);
  check_same_device(op, "bias", bias, x);
  check_same_dtype(op, "bias", bias, x);
  check_activation(op, activation);
  check(x.dim() > 0 && bias.dim() == 1 && bias.numel() == x.sizes().back(), "metalcore::", op,
        ": bias must have the size of the last dimension of x, which is ", shape_text(x), ", and is ",
        shape_text(bias));
  return bias.numel();
}

// A threadgroup of 256 threads, as wide as rows are.
gpu::Size threadgroup_of(uint32_t across) {
  const uint32_t width = std::min(256u, round_up(across, 32u));
  return {width, 256 / width};
}

std::string why_packed(bool aligned, int64_t count) {
  return std::to_string(count) + " elements, " +
         (aligned ? "16 bytes a thread" : "one a thread: rows do not begin and end at multiples of 16 bytes");
}

Tensor bias_activation(const Tensor& input, const Tensor& bias_, const std::string& activation) {
  const int64_t length = check_biased("bias_activation", input, bias_, activation);
  const Tensor y = new_like(input), bias = as_contiguous(bias_);
  if (y.numel() == 0) return y;
  const Rows x = rows_of(input, length);
  const bool aligned = aligned16(x.tensor, x.stride, length) && aligned16(bias, 0, length);
  gpu::note_plan("bias_activation", aligned ? "packed" : "dense", [&] { return why_packed(aligned, y.numel()); });
  const BiasedParams params{.length = grid_side(length), .x_stride = x.stride};
  const uint32_t across = grid_side(aligned ? length * y.element_size() / 16 : length);
  gpu::record(y, [&](gpu::Recording& recording) {
    recording.kernel("biased_", activation, aligned ? "_packed_" : "_dense_", suffix(y.scalar_type()));
    recording.buffer(0, x.tensor).buffer(1, bias).buffer(2, y).bytes(3, params);
    recording.dispatch_threads({across, grid_side(y.numel() / length)}, threadgroup_of(across));
  });
  return y;
}

// The gradients of x and of the bias. The threads of the kernel have as many rows as leave row_threads of them.
std::tuple<Tensor, Tensor> bias_activation_backward(const Tensor& grad, const Tensor& input, const Tensor& bias_,
                                                    const std::string& activation) {
  const char* op = "bias_activation_backward";
  const int64_t length = check_biased(op, input, bias_, activation);
  check_same_device(op, "grad", grad, input);
  check_same_dtype(op, "grad", grad, input);
  check_same_shape(op, "grad", grad, input);
  Tensor gx = new_like(input), gb = new_like(bias_);
  const Tensor bias = as_contiguous(bias_);
  if (input.numel() == 0) {
    torch::stable::zero_(gb);
    return {gx, gb};
  }
  const int64_t rows = input.numel() / length;
  const Rows x = rows_of(input, length), g = rows_of(grad, length);
  const bool aligned =
      aligned16(x.tensor, x.stride, length) && aligned16(g.tensor, g.stride, length) && aligned16(bias, 0, length);
  gpu::note_plan(op, aligned ? "packed" : "dense", [&] { return why_packed(aligned, gx.numel()); });
  const uint32_t across = grid_side(aligned ? length * gx.element_size() / 16 : length);
  constexpr int64_t kLeastRows = 16;
  const int64_t wanted = std::max<int64_t>(1, row_tuning(input).row_threads / across);
  const int64_t chunk_rows = std::max(kLeastRows, ceil_div(rows, wanted)), chunks = ceil_div(rows, chunk_rows);
  const int64_t sizes[2] = {chunks, length};
  const Tensor partial = new_tensor(Sizes(sizes, 2), ScalarType::Float, input);
  const BiasedParams params{
      .length = grid_side(length),
      .rows = grid_side(rows),
      .chunk_rows = grid_side(chunk_rows),
      .x_stride = x.stride,
      .grad_stride = g.stride,
  };
  gpu::record(gx, [&](gpu::Recording& recording) {
    recording.kernel("biased_", activation, aligned ? "_backward_packed_" : "_backward_dense_",
                     suffix(gx.scalar_type()));
    recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, bias).buffer(3, gx).buffer(4, partial);
    recording.bytes(5, params).dispatch_threads({across, grid_side(chunks)}, threadgroup_of(across));
    record_column_sums(recording, partial, chunks, gb);
  });
  return {gx, gb};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("bias_activation(Tensor x, Tensor bias, str activation) -> Tensor");
  m.def("bias_activation_backward(Tensor grad, Tensor x, Tensor bias, str activation) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::bias_activation>("bias_activation");
  m.impl<&metalcore::bias_activation_backward>("bias_activation_backward");
}

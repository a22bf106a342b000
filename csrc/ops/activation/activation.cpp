// Activations of single elements (silu, relu, gelu, relu2, quick_gelu), and of sums with a bias (bias_activation).
#include "../../../kernels/activation/activation.h"

#include "../common/elementwise.h"
#include "../common/replacement.h"
#include "../common/rows.h"
#include "../normalization/norms.h"
#include "activation.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace metalcore {
namespace {

Tensor activation(const char* op, const char* kernel, const Tensor& x) {
  check_float(op, "x", x);
  return elementwise(kernel, {x});
}

// The gradient gets x's strides, also where grad has others.
Tensor activation_backward(const char* op, const char* kernel, const Tensor& grad, const Tensor& x) {
  check_float(op, "x", x);
  check_same_device(op, "grad", grad, x);
  check_same_dtype(op, "grad", grad, x);
  check_same_shape(op, "grad", grad, x);
  return elementwise(kernel, {x, grad});
}

bool is_tanh(const std::string& approximate) {
  check(approximate == "none" || approximate == "tanh", "metalcore::gelu: approximate must be 'none' or 'tanh', not '",
        approximate, "'");
  return approximate == "tanh";
}

Tensor silu(const Tensor& x) { return activation("silu", "silu", x); }
Tensor silu_backward(const Tensor& grad, const Tensor& x) {
  return activation_backward("silu_backward", "silu_backward", grad, x);
}

Tensor relu(const Tensor& x) { return activation("relu", "relu", x); }
Tensor relu_backward(const Tensor& grad, const Tensor& x) {
  return activation_backward("relu_backward", "relu_backward", grad, x);
}

Tensor relu2(const Tensor& x) { return activation("relu2", "relu2", x); }
Tensor relu2_backward(const Tensor& grad, const Tensor& x) {
  return activation_backward("relu2_backward", "relu2_backward", grad, x);
}

Tensor quick_gelu(const Tensor& x) { return activation("quick_gelu", "quick_gelu", x); }
Tensor quick_gelu_backward(const Tensor& grad, const Tensor& x) {
  return activation_backward("quick_gelu_backward", "quick_gelu_backward", grad, x);
}

Tensor gelu(const Tensor& x, const std::string& approximate) {
  return activation("gelu", is_tanh(approximate) ? "gelu_tanh" : "gelu", x);
}
Tensor gelu_backward(const Tensor& grad, const Tensor& x, const std::string& approximate) {
  return activation_backward("gelu_backward", is_tanh(approximate) ? "gelu_tanh_backward" : "gelu_backward", grad, x);
}

// These take the place of PyTorch's kernels.

bool is_known(const std::string& approximate) { return approximate == "none" || approximate == "tanh"; }
bool takes_gelu(const Tensor& x, const std::string& approximate) { return is_float(x) && is_known(approximate); }
bool takes_gelu_backward(const Tensor& grad, const Tensor& x, const std::string& approximate) {
  return are_alike(grad, x) && is_known(approximate);
}

// In place. PyTorch's kernels take tensors whose elements share memory or have gaps between them.
bool is_float_without_gaps(const Tensor& x) { return is_float(x) && is_dense(x); }
bool takes_gelu_in_place(const Tensor& x, const std::string& approximate) {
  return is_float_without_gaps(x) && is_known(approximate);
}
Tensor in_place(const char* kernel, const Tensor& x) {
  if (x.numel() > 0) dense_elementwise_into(kernel, x, {x});
  return x;
}
Tensor silu_in_place(const Tensor& x) { return in_place("silu", x); }
Tensor relu_in_place(const Tensor& x) { return in_place("relu", x); }
Tensor gelu_in_place(const Tensor& x, const std::string& approximate) {
  return in_place(is_tanh(approximate) ? "gelu_tanh" : "gelu", x);
}

Replacement<&is_float_without_gaps, &silu_in_place> silu_in_place_replacement("silu_", "silu");
Replacement<&is_float_without_gaps, &relu_in_place> relu_in_place_replacement("relu_", "relu");
Replacement<&takes_gelu_in_place, &gelu_in_place> gelu_in_place_replacement("gelu_", "gelu");
Replacement<&is_float, &silu> silu_replacement("silu", "silu");
Replacement<&are_alike, &silu_backward> silu_backward_replacement("silu_backward", "silu_backward");
Replacement<&is_float, &relu> relu_replacement("relu", "relu");
Replacement<&takes_gelu, &gelu> gelu_replacement("gelu", "gelu");
Replacement<&takes_gelu_backward, &gelu_backward> gelu_backward_replacement("gelu_backward", "gelu_backward");

}  // namespace

// activation(x + bias), with a bias along the last dimension.
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
  m.def("silu(Tensor x) -> Tensor");
  m.def("silu_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("relu(Tensor x) -> Tensor");
  m.def("relu_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("relu2(Tensor x) -> Tensor");
  m.def("relu2_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("quick_gelu(Tensor x) -> Tensor");
  m.def("quick_gelu_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("gelu(Tensor x, str approximate) -> Tensor");
  m.def("gelu_backward(Tensor grad, Tensor x, str approximate) -> Tensor");
  m.def("bias_activation(Tensor x, Tensor bias, str activation) -> Tensor");
  m.def("bias_activation_backward(Tensor grad, Tensor x, Tensor bias, str activation) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::silu>("silu");
  m.impl<&metalcore::silu_backward>("silu_backward");
  m.impl<&metalcore::relu>("relu");
  m.impl<&metalcore::relu_backward>("relu_backward");
  m.impl<&metalcore::relu2>("relu2");
  m.impl<&metalcore::relu2_backward>("relu2_backward");
  m.impl<&metalcore::quick_gelu>("quick_gelu");
  m.impl<&metalcore::quick_gelu_backward>("quick_gelu_backward");
  m.impl<&metalcore::gelu>("gelu");
  m.impl<&metalcore::gelu_backward>("gelu_backward");
  m.impl<&metalcore::bias_activation>("bias_activation");
  m.impl<&metalcore::bias_activation_backward>("bias_activation_backward");
}

// Activations of single elements: silu, relu, gelu, relu2 and quick_gelu.
#include "../common/elementwise.h"
#include "../common/replacement.h"

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
}

// silu, relu and gelu.
#include "elementwise.h"

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

Tensor gelu(const Tensor& x, const std::string& approximate) {
  return activation("gelu", is_tanh(approximate) ? "gelu_tanh" : "gelu", x);
}
Tensor gelu_backward(const Tensor& grad, const Tensor& x, const std::string& approximate) {
  return activation_backward("gelu_backward", is_tanh(approximate) ? "gelu_tanh_backward" : "gelu_backward", grad, x);
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("silu(Tensor x) -> Tensor");
  m.def("silu_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("relu(Tensor x) -> Tensor");
  m.def("relu_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("gelu(Tensor x, str approximate) -> Tensor");
  m.def("gelu_backward(Tensor grad, Tensor x, str approximate) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl("silu", TORCH_BOX(&metalcore::silu));
  m.impl("silu_backward", TORCH_BOX(&metalcore::silu_backward));
  m.impl("relu", TORCH_BOX(&metalcore::relu));
  m.impl("relu_backward", TORCH_BOX(&metalcore::relu_backward));
  m.impl("gelu", TORCH_BOX(&metalcore::gelu));
  m.impl("gelu_backward", TORCH_BOX(&metalcore::gelu_backward));
}

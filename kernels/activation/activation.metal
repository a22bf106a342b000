// Activations with their derivatives. The gradient kernels take (input, gradient of the output).
#include "activation/formulas.h"
#include "common/elementwise_kernels.h"

INSTANTIATE_UNARY("silu", Silu)
INSTANTIATE_BINARY("silu_backward", SiluGradient)
INSTANTIATE_UNARY("relu", Relu)
INSTANTIATE_BINARY("relu_backward", ReluGradient)
INSTANTIATE_UNARY("gelu", Gelu)
INSTANTIATE_BINARY("gelu_backward", GeluGradient)
INSTANTIATE_UNARY("gelu_tanh", GeluTanh)
INSTANTIATE_BINARY("gelu_tanh_backward", GeluTanhGradient)
INSTANTIATE_UNARY("relu2", Relu2)
INSTANTIATE_BINARY("relu2_backward", Relu2Gradient)
INSTANTIATE_UNARY("quick_gelu", QuickGelu)
INSTANTIATE_BINARY("quick_gelu_backward", QuickGeluGradient)

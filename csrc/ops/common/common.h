// Dtypes, checks, outputs, grids and calls of PyTorch's own ops, which ops' host sides need.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/recorder.h"
#include "operator.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <optional>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace metalcore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
inline MaybeTensor given_if(bool given, const Tensor& tensor) { return given ? MaybeTensor(tensor) : std::nullopt; }

// Throws std::runtime_error (RuntimeError in Python) with the message made of `parts`. Unlike
// STD_TORCH_CHECK it does not name a source file of the build machine.
template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (__builtin_expect(condition, true)) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// A shape in a message, as "[2, 3]". It is text only once it is written: check() writes nothing where all is well.
struct ShapeText {
  Sizes sizes;
};
std::ostream& operator<<(std::ostream& out, const ShapeText& shape);
inline ShapeText shape_text(Sizes sizes) { return {sizes}; }
inline ShapeText shape_text(const Tensor& tensor) { return {tensor.sizes()}; }
const char* dtype_name(ScalarType dtype);  // "float32"; "an unsupported dtype" where Metal has none

// Kernels are named <op>_<variant>_<suffix> after MSL's type names.
inline const char* suffix(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float";
    case ScalarType::Half: return "half";
    case ScalarType::BFloat16: return "bfloat";
    default: throw std::runtime_error(std::string("metalcore: no kernel for ") + dtype_name(dtype));
  }
}
inline std::string kernel_name(const char* stem, ScalarType dtype) { return std::string(stem) + "_" + suffix(dtype); }

bool is_float_dtype(ScalarType dtype);  // whether kernels over floating-point numbers take it
bool same_device(const Tensor& a, const Tensor& b);
bool same_sizes(const Tensor& a, const Tensor& b);

// These checks name the op and the argument, as in "metalcore::silu: x must be float32, float16 or bfloat16, not
// int64".
void check_float(const char* op, const char* argument, const Tensor& tensor);
void check_float32(const char* op, const char* argument, const Tensor& tensor);
void check_same_device(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference);
void check_same_dtype(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference);
void check_same_shape(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference);

// An uninitialized tensor on the device of `like`, contiguous unless strides are given. torch::stable's functions of
// this kind find PyTorch's operator by name, which costs more than a small op may take.
Tensor new_tensor(Sizes sizes, ScalarType dtype, const Tensor& like);
Tensor new_strided(Sizes sizes, Sizes strides, ScalarType dtype, const Tensor& like);
inline Tensor new_like(const Tensor& like) { return new_tensor(like.sizes(), like.scalar_type(), like); }

// The tensor itself if it is contiguous, or a contiguous copy.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}
inline MaybeTensor as_contiguous(const MaybeTensor& tensor) {
  return tensor ? MaybeTensor(as_contiguous(*tensor)) : std::nullopt;
}
// Whether the elements fill memory without gaps, in any order of dimensions.
bool is_dense(const Tensor& tensor);

template <typename T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <typename T>
constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

// Grids have 32-bit sides.
inline uint32_t grid_side(int64_t n) {
  check(n <= INT64_C(0xffffffff), "metalcore: ", n, " threads in one direction are more than a grid can have");
  return static_cast<uint32_t>(n);
}

// Calls PyTorch's own op of this name. An op that returns two tensors is called like this:
// call_torch<2>("aten::linalg_qr", "", a, std::string("reduced")). The arguments must have the types of the schema:
// bool, int64_t, double, std::string, Tensor, or std::optional of one.
template <size_t RESULTS, typename... Arguments>
std::array<Tensor, RESULTS> call_torch(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, (sizeof...(Arguments) > RESULTS ? sizeof...(Arguments) : RESULTS)> stack{
      torch::stable::detail::from(arguments)...};
  check(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS,
        "metalcore: ", name, " failed");
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Tensor, RESULTS>{torch::stable::detail::to<Tensor>(stack[I])...};
  }(std::make_index_sequence<RESULTS>());
}

}  // namespace metalcore

#include "common.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <numeric>
#include <utility>
#include <vector>

namespace metalcore {

namespace {

constexpr std::array<std::pair<const char*, ScalarType>, 12> kDtypes = {{
    {"float32", ScalarType::Float},
    {"float16", ScalarType::Half},
    {"bfloat16", ScalarType::BFloat16},
    {"float64", ScalarType::Double},
    {"bool", ScalarType::Bool},
    {"uint8", ScalarType::Byte},
    {"int8", ScalarType::Char},
    {"int16", ScalarType::Short},
    {"int32", ScalarType::Int},
    {"int64", ScalarType::Long},
    {"complex64", ScalarType::ComplexFloat},
    {"complex128", ScalarType::ComplexDouble},
}};

}  // namespace

const char* dtype_name(ScalarType dtype) {
  for (const auto& [name, value] : kDtypes)
    if (value == dtype) return name;
  return "an unsupported dtype";
}

std::ostream& operator<<(std::ostream& out, const ShapeText& shape) {
  out << "[";
  for (size_t d = 0; d < shape.sizes.size(); ++d) out << (d > 0 ? ", " : "") << shape.sizes[d];
  return out << "]";
}

bool is_float_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

bool same_device(const Tensor& a, const Tensor& b) {
  return gpu::device_type_of(a) == gpu::device_type_of(b) && a.get_device_index() == b.get_device_index();
}

bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin());
}

void check_float(const char* op, const char* argument, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  check(is_float_dtype(dtype), "metalcore::", op, ": ", argument, " must be float32, float16 or bfloat16, not ",
        dtype_name(dtype));
}

void check_float32(const char* op, const char* argument, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  check(dtype == ScalarType::Float, "metalcore::", op, ": ", argument, " must be float32, not ", dtype_name(dtype));
}

void check_same_device(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference) {
  check(same_device(tensor, reference), "metalcore::", op, ": ", argument,
        " must be on the device of the other tensors");
}

void check_same_dtype(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference) {
  check(tensor.scalar_type() == reference.scalar_type(), "metalcore::", op, ": ", argument, " must be ",
        dtype_name(reference.scalar_type()), ", not ", dtype_name(tensor.scalar_type()));
}

void check_same_shape(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference) {
  if (!same_sizes(tensor, reference))
    check(false, "metalcore::", op, ": ", argument, " must have shape ", shape_text(reference), ", not ",
          shape_text(tensor));
}

namespace {

// The stable ABI says only that an allocation failed. The message begins like PyTorch's own for the device, because
// programs that look for the largest batch size read it.
[[noreturn]] void throw_out_of_memory(Sizes sizes, ScalarType dtype, const Tensor& like) {
  double gibibytes = (dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ? 2.0 : 4.0) / (1 << 30);
  for (int64_t size : sizes) gibibytes *= static_cast<double>(size);
  const bool cuda = gpu::device_type_of(like) == aoti_torch_device_type_cuda();
  std::ostringstream message;
  message << (cuda ? "CUDA" : "MPS backend") << " out of memory. metalcore tried to allocate " << std::fixed
          << std::setprecision(2) << gibibytes << " GiB on " << (cuda ? "cuda:" : "mps:") << like.get_device_index()
          << " for a tensor of shape " << shape_text(sizes) << " and dtype " << dtype_name(dtype) << ".";
  throw std::runtime_error(message.str());
}

}  // namespace

Tensor new_strided(Sizes sizes, Sizes strides, ScalarType dtype, const Tensor& like) {
  AtenTensorHandle result = nullptr;
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), number,
                               gpu::device_type_of(like), like.get_device_index(), &result) != AOTI_TORCH_SUCCESS)
    throw_out_of_memory(sizes, dtype, like);
  return Tensor(result);
}

Tensor new_tensor(Sizes sizes, ScalarType dtype, const Tensor& like) {
  constexpr size_t kUsual = 8;  // dimensions, for which nothing is allocated
  std::array<int64_t, kUsual> few;
  std::vector<int64_t> many(sizes.size() > kUsual ? sizes.size() : 0);
  int64_t* const strides = many.empty() ? few.data() : many.data();
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return new_strided(sizes, Sizes(strides, sizes.size()), dtype, like);
}

bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (size_t i : order) {
    if (sizes[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

}  // namespace metalcore

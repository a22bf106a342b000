#include "cpu_route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace metalcore {

namespace {

bool without_memory(const Tensor& tensor) { return gpu::device_type_of(tensor) == aoti_torch_device_type_meta(); }

}  // namespace

const char* name_of(SizeVariant variant) {
  switch (variant) {
    case SizeVariant::empty: return "empty";
    case SizeVariant::simd: return "simd";
    case SizeVariant::block: return "block";
    case SizeVariant::device: return "device";
    case SizeVariant::torch: return "torch";
    case SizeVariant::cpu: return "cpu";
  }
  return "";
}

SizePlan plan_by_size(int64_t n, int64_t batch, const char* nothing, const RouteTuning& tuning, bool torch_may,
                      std::initializer_list<SizeKernel> kernels) {
  const std::string size = times(n, n), count = std::to_string(batch) + " of " + size + ": ";
  if (batch == 0 || n == 0) return {SizeVariant::empty, size + nothing, "", 0, 0};
  if (tuning.cpu.contain(n, batch)) return {SizeVariant::cpu, count + faster_on_cpu(tuning.family), "", 0, 0};
  if (torch_may && tuning.torch.contain(n, batch))
    return {SizeVariant::torch, count + faster_by_torch(tuning.family), "", 0, 0};
  for (const SizeKernel& kernel : kernels)
    if (n <= kernel.most_rows)
      return {kernel.variant, size + ": " + kernel.how, kernel.name, kernel.matrices_per_threadgroup, kernel.threads};
  return {SizeVariant::cpu, too_large_for_kernels(size), "", 0, 0};
}

Tensor copy_to_cpu(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  std::vector<int64_t> strides(sizes.size());
  if (is_dense(tensor)) {
    std::copy(tensor.strides().begin(), tensor.strides().end(), strides.begin());
  } else {
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
  }
  const int32_t device = without_memory(tensor) ? aoti_torch_device_type_meta() : aoti_torch_device_type_cpu();
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(tensor.scalar_type()));
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device, 0,
                                 &handle) == AOTI_TORCH_SUCCESS,
        "metalcore: no memory of the CPU for a tensor of shape ", shape_text(tensor));
  Tensor copy(handle);
  torch::stable::copy_(copy, tensor);
  return copy;
}

Tensor copy_back(const Tensor& result, const Tensor& like) {
  Tensor copy = new_tensor(result.sizes(), result.scalar_type(), like);
  torch::stable::copy_(copy, result);
  return copy;
}

int64_t& calls_on_cpu() {
  static thread_local int64_t calls = 0;
  return calls;
}

NotFinite::NotFinite(const Tensor& copy, Entries entries) {
  MatrixShape s = matrix_shape(copy.sizes());
  const int64_t parts = is_complex(copy) ? 2 : 1;
  s.columns *= parts;
  batch_ = s.batch;
  if (without_memory(copy)) return;
  float* const data = static_cast<float*>(copy.data_ptr());
  for (int64_t matrix = 0; matrix < s.batch; ++matrix) {
    float* const a = data + matrix * s.rows * s.columns;
    bool finite = true;
    for (int64_t row = 0; finite && row < s.rows; ++row) {
      const int64_t first = entries == Entries::upper ? parts * row : 0;
      const int64_t end = entries == Entries::lower ? parts * (row + 1) : s.columns;
      for (int64_t column = first; column < end; ++column) finite &= std::isfinite(a[row * s.columns + column]);
    }
    if (finite) continue;
    matrices_.push_back(matrix);
    std::fill_n(a, s.rows * s.columns, 0.0f);
  }
}

Tensor NotFinite::mark(const Tensor& result) const {
  if (matrices_.empty() || result.numel() == 0) return result;
  const Tensor marked = as_contiguous(result);
  const int64_t floats = is_complex(marked) ? 2 : 1;
  const int64_t each = floats * marked.numel() / batch_;
  float* const data = static_cast<float*>(marked.data_ptr());
  for (int64_t matrix : matrices_) std::fill_n(data + matrix * each, each, std::numeric_limits<float>::quiet_NaN());
  return marked;
}

}  // namespace metalcore

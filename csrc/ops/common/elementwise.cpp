#include "elementwise.h"

#include "../../../kernels/common/strided.h"
#include "../../gpu/cost.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <vector>

namespace metalcore {

namespace {

constexpr gpu::Size kThreadgroup{256};

Tensor output_like(const Tensor& x) {
  if (x.is_contiguous()) return new_like(x);
  if (is_dense(x)) return new_strided(x.sizes(), x.strides(), x.scalar_type(), x);
  return torch::stable::empty_like(x);  // keeps the order of the dimensions
}

bool same_strides(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes(), x = a.strides(), y = b.strides();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1 && x[d] != y[d]) return false;
  return true;
}

}  // namespace

std::optional<StridedParams> strided_params(const Tensor& output, std::initializer_list<Tensor> inputs) {
  if (output.numel() > UINT32_MAX) return std::nullopt;
  const auto sizes = output.sizes(), output_strides = output.strides();
  std::vector<size_t> order;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) order.push_back(d);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return output_strides[a] < output_strides[b]; });

  StridedParams params{};
  for (size_t d : order) {
    const uint32_t last = params.dims - 1;
    bool mergeable = params.dims > 0;
    size_t k = 0;
    for (const Tensor& input : inputs) {
      mergeable = mergeable && input.strides()[d] == params.strides[k][last] * params.sizes[last];
      ++k;
    }
    if (mergeable) {
      params.sizes[last] *= static_cast<uint32_t>(sizes[d]);
      continue;
    }
    if (params.dims == STRIDED_MAX_DIMS) return std::nullopt;
    params.sizes[params.dims] = static_cast<uint32_t>(sizes[d]);
    k = 0;
    for (const Tensor& input : inputs) params.strides[k++][params.dims] = input.strides()[d];
    ++params.dims;
  }
  return params;
}

namespace {

constexpr size_t kMostInputs = 2;
constexpr size_t kPack = 16;                        // bytes that a thread of the packed kernels moves at once
constexpr int64_t kMostThreads = int64_t{1} << 31;  // per dispatch, because a grid's side has 32 bits

// On Metal the storage is an object, and its address is a multiple of 16 too.
bool is_aligned(const gpu::BufferView& view) {
  return (reinterpret_cast<uintptr_t>(view.storage) + view.offset) % kPack == 0;
}

using Number = std::optional<float>;  // that a kernel takes after its tensors

// Dispatches `threads` threads, in several dispatches if one cannot have so many or would be too long. A thread takes
// `bytes` bytes of every view. Afterwards the views begin behind these bytes.
void dispatch(gpu::Recording& recording, const char* op, const char* variant, const char* dtype,
              std::span<gpu::BufferView> views, Number number, int64_t threads, int64_t bytes) {
  const auto bytes_each = static_cast<double>(bytes) * static_cast<double>(views.size());
  const int64_t most = std::min(kMostThreads, gpu::at_once(recording, threads, {0, bytes_each}, 1));
  for (int64_t count; threads > 0; threads -= count) {
    count = std::min(threads, most);
    recording.kernel(op, variant, dtype);
    uint32_t index = 0;
    for (gpu::BufferView& view : views) {
      view.span = count * bytes;
      recording.buffer(index++, view);
      view.offset += count * bytes;
    }
    if (number) recording.bytes(index, *number);
    recording.dispatch_threads({static_cast<uint32_t>(count)}, kThreadgroup);
  }
}

// The packs of elements, and the elements behind the last pack.
struct DensePlan {
  int64_t packs;
  int64_t remaining_elements;
};
DensePlan plan_dense(int64_t count, int64_t item, bool aligned) {
  const int64_t pack = kPack / item;
  return aligned ? DensePlan{count / pack, count % pack} : DensePlan{0, count};
}

std::string count_text(const Tensor& output) { return std::to_string(output.numel()) + " elements"; }

}  // namespace

void dense_elementwise_into(const char* op, const Tensor& output, std::initializer_list<Tensor> inputs,
                            std::optional<float> number) {
  const size_t item = output.element_size();
  std::array<gpu::BufferView, kMostInputs + 1> memory;
  const std::span views(memory.data(), inputs.size() + 1);
  std::transform(inputs.begin(), inputs.end(), views.begin(), [](const Tensor& x) { return gpu::view_of(x); });
  views.back() = gpu::view_of(output);
  const bool all_aligned = std::all_of(views.begin(), views.end(), is_aligned);
  const DensePlan plan = plan_dense(output.numel(), item, all_aligned);
  gpu::note_plan(op, plan.packs ? "packed" : "dense", [&] {
    const std::string bytes = std::to_string(kPack) + " bytes";
    return count_text(output) + (plan.packs    ? ", " + bytes + " a thread"
                                 : all_aligned ? ", fewer than " + bytes
                                               : ": a tensor does not begin at a multiple of " + bytes);
  });
  gpu::record(output, [&](gpu::Recording& recording) {
    const char* const dtype = suffix(output.scalar_type());
    if (plan.packs) dispatch(recording, op, "_packed_", dtype, views, number, plan.packs, kPack);
    if (plan.remaining_elements)
      dispatch(recording, op, "_dense_", dtype, views, number, plan.remaining_elements, item);
  });
}

namespace {

void record_strided(const char* op, std::initializer_list<Tensor> inputs, const Tensor& output,
                    const StridedParams& params, Number number) {
  gpu::note_plan(op, "strided", [&] { return count_text(output) + " with gaps or in different orders, one a thread"; });
  gpu::record(output, [&](gpu::Recording& recording) {
    recording.kernel(op, "_strided_", suffix(output.scalar_type()));
    uint32_t index = 0;
    for (const Tensor& input : inputs) recording.buffer(index++, input);
    recording.buffer(index++, output);
    if (number) recording.bytes(index++, *number);
    recording.bytes(index, params);
    recording.dispatch_threads({static_cast<uint32_t>(output.numel())}, kThreadgroup);
  });
}

}  // namespace

Tensor elementwise(const char* op, std::initializer_list<Tensor> inputs, Number number) {
  const Tensor& first = *inputs.begin();
  Tensor output = output_like(first);
  if (output.numel() == 0) return output;

  bool dense = true;
  for (const Tensor& input : inputs) dense = dense && same_strides(input, output);
  if (dense) {
    dense_elementwise_into(op, output, inputs, number);
  } else if (auto params = strided_params(output, inputs)) {
    record_strided(op, inputs, output, *params, number);
  } else {  // more dimensions or elements than strided kernels take
    output = new_like(first);
    const Tensor a = as_contiguous(first), b = as_contiguous(*(inputs.end() - 1));
    inputs.size() == 1 ? dense_elementwise_into(op, output, {a}, number)
                       : dense_elementwise_into(op, output, {a, b}, number);
  }
  return output;
}

}  // namespace metalcore

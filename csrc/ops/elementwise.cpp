#include "elementwise.h"

#include "../../kernels/common/strided.h"

#include <algorithm>
#include <numeric>
#include <optional>

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

// How to walk the inputs in the output's memory order; nothing where that takes more dimensions or a longer index than
// kernels have.
std::optional<StridedParams> walk(const Tensor& output, std::initializer_list<Tensor> inputs) {
  if (output.numel() > UINT32_MAX) return std::nullopt;
  const auto sizes = output.sizes(), order_by = output.strides();
  std::vector<size_t> order;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) order.push_back(d);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return order_by[a] < order_by[b]; });

  StridedParams params{};
  for (size_t d : order) {
    const uint32_t last = params.dims - 1;
    bool merges = params.dims > 0;
    size_t k = 0;
    for (const Tensor& input : inputs) {
      merges = merges && input.strides()[d] == params.strides[k][last] * params.sizes[last];
      ++k;
    }
    if (merges) {
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

constexpr size_t kPack = 16;                        // bytes that a thread of the packed kernels moves at once
constexpr int64_t kMostThreads = int64_t{1} << 31;  // of a dispatch; a grid's side has 32 bits

// On Metal the storage is an object, whose address is a multiple of 16 as well.
bool aligned(const gpu::BufferView& view) {
  return (reinterpret_cast<uintptr_t>(view.storage) + view.offset) % kPack == 0;
}

// So many threads, each of which takes `bytes` bytes of every view, in as many dispatches as they need. Leaves the
// views behind what was taken.
void dispatch(gpu::Encoder& encoder, const std::string& kernel, std::vector<gpu::BufferView>& views, int64_t threads,
              int64_t bytes) {
  for (int64_t count; threads > 0; threads -= count) {
    count = std::min(threads, kMostThreads);
    encoder.kernel(kernel);
    for (size_t i = 0; i < views.size(); ++i) {
      views[i].span = count * bytes;
      encoder.buffer(static_cast<uint32_t>(i), views[i]);
      views[i].offset += count * bytes;
    }
    encoder.dispatch_threads({static_cast<uint32_t>(count)}, kThreadgroup);
  }
}

// Packs of elements, then those that are left over.
struct DensePlan {
  int64_t packs;
  int64_t rest;
};
DensePlan plan_dense(int64_t count, int64_t item, bool aligned) {
  const int64_t pack = kPack / item;
  return aligned ? DensePlan{count / pack, count % pack} : DensePlan{0, count};
}

void encode_dense(const char* op, std::initializer_list<Tensor> inputs, const Tensor& output) {
  const size_t item = output.element_size();
  std::vector<gpu::BufferView> views;
  for (const Tensor& input : inputs) views.push_back(gpu::view_of(input));
  views.push_back(gpu::view_of(output));
  const DensePlan plan = plan_dense(output.numel(), item, std::all_of(views.begin(), views.end(), aligned));
  gpu::encode(output, [&](gpu::Encoder& encoder) {
    const std::string end = std::string("_") + suffix(output.scalar_type());
    if (plan.packs) dispatch(encoder, op + ("_packed" + end), views, plan.packs, kPack);
    if (plan.rest) dispatch(encoder, op + ("_dense" + end), views, plan.rest, item);
  });
}

void encode_strided(const char* op, std::initializer_list<Tensor> inputs, const Tensor& output,
                    const StridedParams& params) {
  gpu::encode(output, [&](gpu::Encoder& encoder) {
    encoder.kernel(op + ("_strided_" + std::string(suffix(output.scalar_type()))));
    uint32_t index = 0;
    for (const Tensor& input : inputs) encoder.buffer(index++, input);
    encoder.buffer(index, output).bytes(index + 1, params);
    encoder.dispatch_threads({static_cast<uint32_t>(output.numel())}, kThreadgroup);
  });
}

}  // namespace

Tensor elementwise(const char* op, std::initializer_list<Tensor> inputs) {
  const Tensor& first = *inputs.begin();
  Tensor output = output_like(first);
  if (output.numel() == 0) return output;

  bool dense = true;
  for (const Tensor& input : inputs) dense = dense && same_strides(input, output);
  if (dense) {
    encode_dense(op, inputs, output);
  } else if (auto params = walk(output, inputs)) {
    encode_strided(op, inputs, output, *params);
  } else {  // more dimensions or elements than strided kernels take
    output = new_like(first);
    const Tensor a = as_contiguous(first), b = as_contiguous(*(inputs.end() - 1));
    inputs.size() == 1 ? encode_dense(op, {a}, output) : encode_dense(op, {a, b}, output);
  }
  return output;
}

Explanation explain_elementwise(std::string op, const Request& request) {
  if (request.option("backward", "False") == "True") op += "_backward";
  check(!request.shapes.empty(), "metalcore::", op, ": explain needs the input's shape");
  const int64_t count =
      std::accumulate(request.shapes[0].begin(), request.shapes[0].end(), int64_t{1}, std::multiplies<>());
  const int64_t item = request.dtype == ScalarType::Float ? 4 : 2;
  const DensePlan plan = plan_dense(count, item, true);
  const std::string end = std::string("_") + suffix(request.dtype);
  const std::string why = std::to_string(count) + " elements, " + std::to_string(kPack / item) +
                          " a thread; tensors that begin elsewhere than at multiples of " + std::to_string(kPack) +
                          " bytes take the dense kernel, those with gaps or in different orders the strided one, one "
                          "element a thread";
  Explanation explanation{"packed", why, {}};
  if (plan.packs) explanation.steps.push_back({op + ("_packed" + end), {grid_side(plan.packs)}, kThreadgroup, true});
  if (plan.rest) explanation.steps.push_back({op + ("_dense" + end), {grid_side(plan.rest)}, kThreadgroup, true});
  return explanation;
}

}  // namespace metalcore

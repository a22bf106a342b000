#include "adamw_arrays.h"

#include <algorithm>
#include <bit>
#include <tuple>

namespace metalcore {
namespace {

constexpr const char* kNames[kArrays] = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};

Sizes sizes_of(AtenTensorHandle tensor) {
  int64_t* sizes = nullptr;
  int64_t dim = 0;
  aoti_torch_get_sizes(tensor, &sizes);
  aoti_torch_get_dim(tensor, &dim);
  return Sizes(sizes, static_cast<size_t>(dim));
}

// It is true for most tensors, and these need no other check.
bool is_contiguous_as(AtenTensorHandle tensor, const TensorKind& kind, Sizes sizes) {
  bool contiguous = false;
  aoti_torch_is_contiguous(tensor, &contiguous);
  if (!contiguous || kind_of(tensor) != kind) return false;
  const Sizes own = sizes_of(tensor);
  return own.size() == sizes.size() && std::equal(own.begin(), own.end(), sizes.begin());
}

// Sparse tensors do not reach this check: PyTorch finds no kernel for them.
void check_tensor(const char* argument, const Tensor& tensor, const Tensor& param, const Tensor& first,
                  ScalarType dtype, bool written) {
  check_same_device("adamw_", argument, tensor, first);
  check_same_shape("adamw_", argument, tensor, param);
  check(tensor.scalar_type() == dtype, "metalcore::adamw_: ", argument, " must be ", dtype_name(dtype), ", not ",
        dtype_name(tensor.scalar_type()));
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; written && i < sizes.size(); ++i)
    check(strides[i] != 0 || sizes[i] <= 1, "metalcore::adamw_: ", argument,
          " is to be written, but is an expanded tensor: several of its elements are one memory location");
}

// Finds an address that occurs twice. A hash table with open addressing takes a fraction of the time of sorting.
class Addresses {
 public:
  explicit Addresses(size_t max_count)
      : table_(std::bit_ceil(2 * max_count + 2)), shift_(64 - std::countr_zero(table_.size())) {}

  bool has_or_add(const void* address) {
    size_t at = reinterpret_cast<uintptr_t>(address) * UINT64_C(0x9e3779b97f4a7c15) >> shift_;
    for (; table_[at] != nullptr; at = (at + 1) % table_.size())
      if (table_[at] == address) return true;
    table_[at] = address;
    return false;
  }

 private:
  std::vector<const void*> table_;
  int shift_;
};

}  // namespace

GatheredParameter::GatheredParameter(const AdamWLists& lists, size_t parameter, bool writes_grads,
                                     gpu::BufferView* views) {
  const Tensor param = lists[kParam]->tensor(parameter);
  Sizes strides = param.strides();
  std::vector<int64_t> contiguous;
  if (!is_dense(param)) {
    const auto sizes = param.sizes();
    contiguous.resize(sizes.size());
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) contiguous[i] = stride;
    strides = Sizes(contiguous.data(), contiguous.size());
  }
  for (size_t array = 0; array < kArrays; ++array)
    if (!lists[array]->empty())
      views[array] =
          gpu::view_of(with_strides(lists[array]->tensor(parameter), strides, array != kGrad || writes_grads));
}

void GatheredParameter::write_back() {
  for (auto& [original, copy, written] : copies_)
    if (written) torch::stable::copy_(original, copy);
}

Tensor GatheredParameter::with_strides(const Tensor& tensor, Sizes strides, bool written) {
  const auto sizes = tensor.sizes(), own = tensor.strides();
  bool in_place = true;
  for (size_t i = 0; i < sizes.size(); ++i) in_place = in_place && (own[i] == strides[i] || sizes[i] == 1);
  if (in_place) return tensor;
  Tensor copy = new_strided(sizes, strides, tensor.scalar_type(), tensor);
  torch::stable::copy_(copy, tensor);
  copies_.push_back({tensor, copy, written});
  return copy;
}

AdamWArrays::AdamWArrays(const AdamWLists& lists, bool writes_grads)
    : lists_(lists), writes_grads_(writes_grads), first_(lists[kParam]->tensor(0)), param_item_(first_.element_size()) {
  const TensorList& params = *lists[kParam];
  check_float("adamw_", kNames[kParam], first_);
  for (size_t array = 0; array < kArrays; ++array)
    check(lists[array]->size() == params.size() || (array == kMaxExpAvgSq && lists[array]->empty()),
          "metalcore::adamw_: ", kNames[array], " has ", lists[array]->size(), " tensors, params ", params.size());

  const size_t arrays = amsgrad() ? kArrays : kMaxExpAvgSq;
  const TensorKind param_kind = kind_of(params[0]);
  // The first moment decides: moments have its dtype if that is the parameters', or else float32.
  const bool as_params = kind_of((*lists[kExpAvg])[0]) == param_kind;
  const TensorKind moment_kind = {param_kind.device_type, param_kind.device_index,
                                  as_params ? param_kind.dtype : aoti_torch_dtype_float32()};
  const ScalarType moment_dtype = as_params ? first_.scalar_type() : ScalarType::Float;
  moment_item_ = as_params ? param_item_ : sizeof(float);
  slots_.reserve(params.size());
  views_.resize(params.size() * kArrays);  // zeroed
  for (size_t i = 0; i < params.size(); ++i) {
    const Sizes sizes = sizes_of(params[i]);
    bool contiguous = true;
    for (size_t array = 0; array < arrays; ++array) {
      const bool moment = array >= kExpAvg;
      if (is_contiguous_as((*lists[array])[i], moment ? moment_kind : param_kind, sizes)) continue;
      contiguous = false;
      check_tensor(kNames[array], lists[array]->tensor(i), params.tensor(i), first_,
                   moment ? moment_dtype : first_.scalar_type(), array != kGrad || writes_grads);
    }
    const auto numel = static_cast<uint64_t>(numel_of(params[i]));
    if (numel == 0) continue;
    gpu::BufferView* const views = &views_[slots_.size() * kArrays];
    for (size_t array = 0; contiguous && array < arrays; ++array)
      views[array] = gpu::view_of((*lists[array])[i], item(array), numel * item(array));
    if (!contiguous) views[kParam] = gpu::view_of(params.tensor(i));
    slots_.push_back({i, numel, contiguous});
  }
}

// On Metal a storage is an object, and its address is a multiple of 16.
bool AdamWArrays::aligned4(size_t slot) const {
  for (size_t array = 0; array < kArrays; ++array) {
    const gpu::BufferView& view = views(slot)[array];
    if ((reinterpret_cast<uintptr_t>(view.storage) + view.offset) % (4 * item(array)) != 0) return false;
  }
  return true;
}

std::vector<GatheredParameter> AdamWArrays::gather(size_t first, size_t count) {
  std::vector<GatheredParameter> gathered;
  for (size_t slot = first; slot < first + count; ++slot)
    if (!slots_[slot].contiguous)
      gathered.emplace_back(lists_, slots_[slot].parameter, writes_grads_, &views_[slot * kArrays]);
  return gathered;
}

bool AdamWArrays::overlap() const {
  // Memory is compared within a storage: on Metal a storage is an object, whose address says nothing of other storages.
  std::vector<std::tuple<void*, size_t, size_t>> spans;
  spans.reserve(slots_.size());
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const gpu::BufferView& view = views(slot)[kParam];
    if (view.storage) spans.emplace_back(view.storage, view.offset, view.span);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    const auto& [storage, offset, span] = spans[i - 1];
    if (storage == std::get<0>(spans[i]) && offset + span > std::get<1>(spans[i])) return true;
  }
  return false;
}

bool AdamWArrays::share_state(const std::vector<AtenTensorHandle>& steps) const {
  const size_t moments = amsgrad() ? kArrays : kMaxExpAvgSq;
  Addresses seen(steps.size() + slots_.size() * (moments - kExpAvg));
  for (AtenTensorHandle step : steps) {
    void* address = nullptr;
    aoti_torch_get_data_ptr(step, &address);
    if (address && seen.has_or_add(address)) return true;
  }
  for (const AdamWSlot& slot : slots_)
    for (size_t array = kExpAvg; array < moments; ++array) {
      void* address = nullptr;
      aoti_torch_get_data_ptr((*lists_[array])[slot.parameter], &address);
      if (address && seen.has_or_add(address)) return true;
    }
  return false;
}

}  // namespace metalcore

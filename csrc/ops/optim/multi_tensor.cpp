#include "multi_tensor.h"

#include "../../gpu/tuning.h"

#include <Python.h>

#include <algorithm>
#include <array>
#include <bit>
#include <tuple>

namespace metalcore {

using torch::stable::Tensor;

TensorList::TensorList(StableListHandle list) {
  size_t size = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
  handles_.resize(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue item;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
    handles_[i] = torch::stable::detail::to<AtenTensorHandle>(item);
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
}

// PyTorch acquires and releases the GIL for each tensor whose last owner is the Python object. That costs little if the
// thread already has the GIL, and then it waits for other threads once and not at every tensor.
TensorList::~TensorList() {
  const bool needs_gil = !handles_.empty() && Py_IsInitialized();
  const PyGILState_STATE state = needs_gil ? PyGILState_Ensure() : PyGILState_UNLOCKED;
  for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
  if (needs_gil) PyGILState_Release(state);
}

Tensor TensorList::tensor(size_t i) const {
  AtenTensorHandle shared = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handles_[i], &shared));
  return Tensor(shared);
}

StableIValue on_stack(const TensorList& list) {
  StableListHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(list.size(), &made));
  for (size_t i = 0; i < list.size(); ++i)
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(made, torch::stable::detail::from(list.tensor(i))));
  return torch::stable::detail::from(made);
}

namespace {

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
void check_tensor(const char* op, const ArrayList& list, const Tensor& tensor, const Tensor& param, const Tensor& first,
                  ScalarType dtype) {
  check_same_device(op, list.name, tensor, first);
  check_same_shape(op, list.name, tensor, param);
  check(tensor.scalar_type() == dtype, "metalcore::", op, ": ", list.name, " must be ", dtype_name(dtype), ", not ",
        dtype_name(tensor.scalar_type()));
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; list.written && i < sizes.size(); ++i)
    check(strides[i] != 0 || sizes[i] <= 1, "metalcore::", op, ": ", list.name,
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

GatheredParameter::GatheredParameter(const ArrayLists& lists, size_t parameter, gpu::BufferView* views) {
  const Tensor param = lists[0].tensors.tensor(parameter);
  Sizes strides = param.strides();
  std::vector<int64_t> contiguous;
  if (!is_dense(param)) {
    const auto sizes = param.sizes();
    contiguous.resize(sizes.size());
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) contiguous[i] = stride;
    strides = Sizes(contiguous.data(), contiguous.size());
  }
  for (size_t array = 0; array < lists.size(); ++array)
    if (!lists[array].tensors.empty())
      views[array] = gpu::view_of(
          used_.emplace_back(with_strides(lists[array].tensors.tensor(parameter), strides, lists[array].written)));
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

ParameterArrays::ParameterArrays(const char* op, ArrayLists lists)
    : lists_(std::move(lists)),
      first_(lists_[0].tensors.tensor(0)),
      param_item_(first_.element_size()),
      state_item_(param_item_),
      state_dtype_(first_.scalar_type()) {
  const TensorList& params = lists_[0].tensors;
  check_float(op, lists_[0].name, first_);
  for (const ArrayList& list : lists_)
    check(list.tensors.size() == params.size() || (list.optional && list.tensors.empty()), "metalcore::", op, ": ",
          list.name, " has ", list.tensors.size(), " tensors, ", lists_[0].name, " ", params.size());

  // The first state decides: states have its dtype if that is the parameters' or bfloat16, or else float32.
  const TensorKind param_kind = kind_of(params[0]);
  TensorKind state_kind = param_kind;
  const auto state = std::find_if(lists_.begin(), lists_.end(), [](const ArrayList& list) { return list.state; });
  if (state != lists_.end() && !state->tensors.empty()) {
    state_kind.dtype = kind_of(state->tensors[0]).dtype;
    if (state_kind.dtype != param_kind.dtype) {
      const bool bfloat = state_kind.dtype == aoti_torch_dtype_bfloat16();
      state_kind.dtype = bfloat ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
      state_dtype_ = bfloat ? ScalarType::BFloat16 : ScalarType::Float;
      state_item_ = bfloat ? 2 : sizeof(float);
    }
  }
  slots_.reserve(params.size());
  views_.resize(params.size() * arrays());  // zeroed
  for (size_t i = 0; i < params.size(); ++i) {
    const Sizes sizes = sizes_of(params[i]);
    bool contiguous = true;
    for (const ArrayList& list : lists_) {
      if (list.tensors.empty() || is_contiguous_as(list.tensors[i], list.state ? state_kind : param_kind, sizes))
        continue;
      contiguous = false;
      check_tensor(op, list, list.tensors.tensor(i), params.tensor(i), first_,
                   list.state ? state_dtype_ : first_.scalar_type());
    }
    const auto numel = static_cast<uint64_t>(numel_of(params[i]));
    if (numel == 0) continue;
    gpu::BufferView* const views = &views_[slots_.size() * arrays()];
    for (size_t array = 0; contiguous && array < arrays(); ++array)
      if (!lists_[array].tensors.empty())
        views[array] = gpu::view_of(lists_[array].tensors[i], item(array), numel * item(array));
    if (!contiguous) views[0] = gpu::view_of(params.tensor(i));
    slots_.push_back({i, numel, contiguous});
  }
}

// On Metal a storage is an object, and its address is a multiple of 16.
bool ParameterArrays::aligned16(size_t slot) const {
  for (size_t array = 0; array < arrays(); ++array) {
    const gpu::BufferView& view = views(slot)[array];
    if ((reinterpret_cast<uintptr_t>(view.storage) + view.offset) % 16 != 0) return false;
  }
  return true;
}

std::vector<GatheredParameter> ParameterArrays::gather(size_t first, size_t count) {
  std::vector<GatheredParameter> gathered;
  for (size_t slot = first; slot < first + count; ++slot)
    if (!slots_[slot].contiguous) gathered.emplace_back(lists_, slots_[slot].parameter, &views_[slot * arrays()]);
  return gathered;
}

bool ParameterArrays::overlap() const {
  // Memory is compared within a storage: on Metal a storage is an object, whose address says nothing of other storages.
  std::vector<std::tuple<void*, size_t, size_t>> spans;
  spans.reserve(slots_.size());
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const gpu::BufferView& view = views(slot)[0];
    if (view.storage) spans.emplace_back(view.storage, view.offset, view.span);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    const auto& [storage, offset, span] = spans[i - 1];
    if (storage == std::get<0>(spans[i]) && offset + span > std::get<1>(spans[i])) return true;
  }
  return false;
}

bool ParameterArrays::share_state(const std::vector<AtenTensorHandle>& others) const {
  Addresses seen(others.size() + slots_.size() * arrays());
  const auto again = [&](AtenTensorHandle tensor) {
    void* address = nullptr;
    aoti_torch_get_data_ptr(tensor, &address);
    return address && seen.has_or_add(address);
  };
  for (AtenTensorHandle other : others)
    if (again(other)) return true;
  for (const ParameterSlot& slot : slots_)
    for (const ArrayList& list : lists_)
      if (list.state && !list.tensors.empty() && again(list.tensors[slot.parameter])) return true;
  return false;
}

namespace {

struct OptimTuning {
  const char* family;
  // Whether neighbouring threads load neighbouring vectors of 16 bytes. Otherwise each thread loads a run of its own.
  bool vectors = true;
  int64_t threads = 64;  // of a threadgroup
  int64_t strips = 2;    // of OPTIM_STRIP elements, which each of its simdgroups works on
  // Where there are at most so many elements, a simdgroup works on OPTIM_BLOCK of them: a thread's loads wait for what
  // it has stored before, and threadgroups are too few to hide that.
  int64_t few_elements = 0;
};
const gpu::Table<OptimTuning> optim_tuning("optim",
                                           {{"vectors", &OptimTuning::vectors},
                                            {"threads", &OptimTuning::threads, {32, OPTIM_MAX_THREADS, 32}},
                                            {"strips", &OptimTuning::strips, {1, 16}},
                                            {"few_elements", &OptimTuning::few_elements, {0, 1 << 30}}},
                                           {{.family = "baseline"},
                                            {.family = "hopper", .few_elements = 1 << 20},
                                            {.family = "simulator", .vectors = false}});

// A thread walks over at most so many times the elements that the tuning row says.
constexpr uint64_t kLargerChunks = 64;

void check_scalar(const char* op, const char* argument, const MaybeTensor& tensor, const Tensor& reference) {
  if (!tensor) return;
  check_same_device(op, argument, *tensor, reference);
  check(tensor->numel() == 1 && tensor->scalar_type() == ScalarType::Float, "metalcore::", op, ": ", argument,
        " must be one float32 element");
}

}  // namespace

OptimPlan::OptimPlan(const ParameterArrays& arrays, size_t first, size_t count, uint64_t most_chunks,
                     size_t more_arrays) {
  const OptimTuning& tuning = optim_tuning(arrays.first());
  const auto threads = static_cast<uint32_t>(tuning.threads);
  uint64_t elements = 0;
  for (size_t slot = first; slot < first + count; ++slot) elements += arrays.slots()[slot].numel;
  const bool few = elements <= static_cast<uint64_t>(tuning.few_elements);
  const auto least = static_cast<uint64_t>(threads / 32 * (few ? OPTIM_BLOCK : tuning.strips * OPTIM_STRIP));
  const uint64_t larger = std::clamp<uint64_t>(elements / least / most_chunks, 1, kLargerChunks);
  const auto chunk = static_cast<uint32_t>(larger * least);
  tensors.reserve(count);
  for (size_t slot = first; slot < first + count; ++slot) {
    const uint64_t numel = arrays.slots()[slot].numel, chunks = ceil_div<uint64_t>(numel, chunk);
    if (dispatches.empty() || dispatches.back().count == at_most(std::max(arrays.arrays(), more_arrays)) ||
        dispatches.back().threadgroups + chunks > UINT32_MAX / threads)
      dispatches.push_back({slot, 0, 0, threads, {0, static_cast<uint32_t>(slot), chunk}, arrays.views(slot), nullptr});
    OptimDispatch& dispatch = dispatches.back();
    tensors.push_back({numel, dispatch.threadgroups, tuning.vectors && arrays.aligned16(slot)});
    dispatch.count += 1;
    dispatch.threadgroups += grid_side(static_cast<int64_t>(chunks));
  }
  for (OptimDispatch& dispatch : dispatches) {
    dispatch.grid.tensors = static_cast<uint32_t>(dispatch.count);
    dispatch.tensors = &tensors[dispatch.first - first];
  }
}

uint32_t OptimPlan::threadgroups() const {
  uint64_t sum = 0;
  for (const OptimDispatch& dispatch : dispatches) sum += dispatch.threadgroups;
  return grid_side(static_cast<int64_t>(sum));
}

gpu::Recording& OptimDispatch::begin(gpu::Recording& recording, const std::string& kernel, size_t arrays) const {
  return recording.kernel(kernel).pointers(0, views, count * arrays).bytes(1, tensors, count * sizeof(OptimTensor));
}

std::string plan_reason(const ParameterArrays& arrays) {
  return std::to_string(arrays.slots().size()) + " parameters that are not empty, at most " +
         std::to_string(at_most(arrays.arrays())) + " in a dispatch";
}

void DeviceScalars::check(const char* op, const Tensor& reference) const {
  check_scalar(op, "lr_tensor", lr, reference);
  check_scalar(op, "grad_scale", grad_scale, reference);
  check_scalar(op, "found_inf", found_inf, reference);
}

void DeviceScalars::bind(gpu::Recording& recording, uint32_t index) const {
  const std::array<gpu::BufferView, 3> views = {gpu::view_of(lr), gpu::view_of(grad_scale), gpu::view_of(found_inf)};
  recording.pointers(index, views.data(), views.size());
}

}  // namespace metalcore

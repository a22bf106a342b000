// How ops over many parameters check the lists of tensors that they get, arrange them as the arrays that kernels take,
// and share them out over dispatches.
#pragma once

#include "../../../kernels/optim/optim.h"
#include "../common/common.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace metalcore {

// A list of tensors, for ops that take many of them: an argument `const TensorList&` of a boxed function. It owns the
// handles that PyTorch gives it. A std::vector<Tensor> would allocate a reference count for each tensor. Where a kernel
// needs only a tensor's address, that would cost as much as all other work on the tensor.
class TensorList {
 public:
  explicit TensorList(StableListHandle list);
  TensorList(TensorList&& other) noexcept : handles_(std::exchange(other.handles_, {})) {}
  ~TensorList();

  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }

  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }  // the list keeps the reference
  torch::stable::Tensor tensor(size_t i) const;

 private:
  std::vector<AtenTensorHandle> handles_;
};

// Device and dtype as PyTorch numbers them. Comparing these is cheap.
struct TensorKind {
  int32_t device_type = -1, device_index = -1, dtype = -1;
  bool operator==(const TensorKind&) const = default;
};

inline TensorKind kind_of(AtenTensorHandle tensor) {
  TensorKind kind;
  aoti_torch_get_device_type(tensor, &kind.device_type);
  aoti_torch_get_device_index(tensor, &kind.device_index);
  aoti_torch_get_dtype(tensor, &kind.dtype);
  return kind;
}

inline int64_t numel_of(AtenTensorHandle tensor) {
  int64_t numel = -1;
  aoti_torch_get_numel(tensor, &numel);
  return numel;
}

// What an operator in Python gets (common/operator.h).
StableIValue on_stack(const TensorList& list);

}  // namespace metalcore

template <>
struct torch::stable::detail::ToImpl<metalcore::TensorList> {
  static metalcore::TensorList call(StableIValue value, uint64_t, bool) {
    return metalcore::TensorList(to<StableListHandle>(value));
  }
};

namespace metalcore {

// A list among an op's arguments. The first is the one whose shapes, device and dtype the others follow.
struct ArrayList {
  const char* name;
  const TensorList& tensors;
  bool written;
  bool state = false;     // it may have another dtype: float32 or bfloat16
  bool optional = false;  // it may be empty
};
using ArrayLists = std::vector<ArrayList>;

// Gives the tensors of one parameter one dense layout, so that one index serves them all. Copies replace tensors of
// another layout, and write_back() copies the results to the originals.
class GatheredParameter {
 public:
  // Writes the views of the tensors, one for each list, to `views`.
  GatheredParameter(const ArrayLists& lists, size_t parameter, gpu::BufferView* views);
  void write_back();

 private:
  struct Copy {
    Tensor original, copy;
    bool written;
  };
  Tensor with_strides(const Tensor& tensor, Sizes strides, bool written);

  std::vector<Copy> copies_;
  std::vector<Tensor> used_;  // which the views refer to
};

// One parameter that is not empty.
struct ParameterSlot {
  size_t parameter;  // its index in the lists
  uint64_t numel;
  bool contiguous;  // whether all of its tensors are
};

class ParameterArrays {
 public:
  // Throws, naming the op, where a list does not match the first one. The lists, at least one of them with tensors,
  // must outlive the object.
  ParameterArrays(const char* op, ArrayLists lists);

  const Tensor& first() const { return first_; }           // the first parameter: the others have its device and dtype
  ScalarType state_dtype() const { return state_dtype_; }  // of the lists that are states
  size_t arrays() const { return lists_.size(); }
  const std::vector<ParameterSlot>& slots() const { return slots_; }
  // The views of the slot's tensors, one for each list, followed by those of the next slot. They are valid after
  // gather().
  const gpu::BufferView* views(size_t slot) const { return &views_[slot * arrays()]; }
  // Whether a kernel may move all of the slot's arrays as vectors of 16 bytes.
  bool aligned16(size_t slot) const;

  // Gives the tensors of `count` slots the layout of the kernel. The caller keeps the results while the kernel runs.
  std::vector<GatheredParameter> gather(size_t first, size_t count);
  // Whether the memory of two parameters may overlap. It compares spans, and a false alarm costs only time.
  bool overlap() const;
  // Whether two parameters share a state or one of `others`, which then begin at the same address.
  bool share_state(const std::vector<AtenTensorHandle>& others = {}) const;

 private:
  size_t item(size_t array) const { return lists_[array].state ? state_item_ : param_item_; }  // bytes of an element

  ArrayLists lists_;
  Tensor first_;
  size_t param_item_, state_item_;
  ScalarType state_dtype_;
  std::vector<ParameterSlot> slots_;
  std::vector<gpu::BufferView> views_;
};

// One dispatch over tensors of a list of slots.
struct OptimDispatch {
  size_t first, count;  // slots
  uint32_t threadgroups, threads;
  OptimGrid grid;
  const gpu::BufferView* views;
  const OptimTensor* tensors;

  // Selects the kernel, and binds the table of pointers at 0 and the tensors at 1.
  gpu::Recording& begin(gpu::Recording& recording, const std::string& kernel, size_t arrays) const;
  void end(gpu::Recording& recording) const { recording.dispatch_threadgroups({threadgroups}, {threads}); }
};

// The dispatches over slots [first, first + count): as many slots to each as a table of pointers can hold.
struct OptimPlan {
  std::vector<OptimTensor> tensors;
  std::vector<OptimDispatch> dispatches;

  // Chunks are as large as a tuning row says, or larger where there would be more than `most_chunks`. `more_arrays` are
  // those of a second table of pointers, of which a dispatch can take as many as both tables hold.
  OptimPlan(const ParameterArrays& arrays, size_t first, size_t count, uint64_t most_chunks = UINT64_MAX,
            size_t more_arrays = 0);
  uint32_t threadgroups() const;  // of all dispatches
};

// The pointers that a table can hold, and the parameters of `arrays` arrays each that one dispatch can take: their
// OptimTensors are bytes of the dispatch, of which Metal allows 4,096.
constexpr size_t kPointers = 512;
constexpr size_t at_most(size_t arrays) { return std::min(kPointers / arrays, 4096 / sizeof(OptimTensor)); }

std::string plan_reason(const ParameterArrays& arrays);

// Learning rate, scale of the gradients, and whether they overflow, in device memory. Each may be left out.
struct DeviceScalars {
  const MaybeTensor &lr, &grad_scale, &found_inf;

  bool any() const { return lr || grad_scale || found_inf; }
  void check(const char* op, const Tensor& reference) const;
  // Binds OptimScalarPointers.
  void bind(gpu::Recording& recording, uint32_t index) const;
};

// Records what updates the slots, in one go. Parameters that overlap or share a state are updated one after the
// other, as in PyTorch's loop, because each needs the results of the one before.
template <typename Record>
void record_updates(ParameterArrays& arrays, const Record& record) {
  const size_t slots = arrays.slots().size();
  const size_t at_once = arrays.overlap() || arrays.share_state() ? 1 : slots;
  for (size_t first = 0; first < slots; first += at_once) {
    std::vector<GatheredParameter> gathered = arrays.gather(first, at_once);
    const OptimPlan plan(arrays, first, at_once);
    gpu::record(arrays.first(), [&](gpu::Recording& recording) { record(recording, plan); });
    for (GatheredParameter& parameter : gathered) parameter.write_back();
  }
}

}  // namespace metalcore

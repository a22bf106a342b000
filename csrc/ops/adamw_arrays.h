// Checks the tensors that adamw_ gets, and arranges them as the arrays that its kernel takes.
#pragma once

#include "common.h"
#include "tensor_list.h"

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace metalcore {

// A parameter's arrays, in the order of AdamWPointers in the kernel.
enum AdamWArray : size_t { kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kArrays };
using AdamWLists = std::array<const TensorList*, kArrays>;  // without amsgrad the list kMaxExpAvgSq is empty

// Gives the tensors of one parameter one dense layout, so that one index serves them all. Copies replace tensors of
// another layout, and write_back() copies the results to the originals.
class GatheredParameter {
 public:
  // Writes the views of the tensors, kArrays of them, to `views`.
  GatheredParameter(const AdamWLists& lists, size_t parameter, bool writes_grads, gpu::BufferView* views);
  void write_back();

 private:
  struct Copy {
    Tensor original, copy;
    bool written;
  };
  Tensor with_strides(const Tensor& tensor, Sizes strides, bool written);

  std::vector<Copy> copies_;
};

// One parameter that is not empty.
struct AdamWSlot {
  size_t parameter;  // its index in the lists
  uint64_t numel;
  bool contiguous;  // whether all of its tensors are
};

class AdamWArrays {
 public:
  // Throws where a list does not match the parameters. The lists must outlive the object.
  AdamWArrays(const AdamWLists& lists, bool writes_grads);

  const Tensor& first() const { return first_; }  // the first parameter: the others have its device and dtype
  bool amsgrad() const { return !lists_[kMaxExpAvgSq]->empty(); }
  bool narrow() const { return moment_item_ < sizeof(float); }  // whether moments have the parameters' 16-bit dtype
  const std::vector<AdamWSlot>& slots() const { return slots_; }
  // The views of the slot's kArrays tensors, followed by those of the next slot. They are valid after gather().
  const gpu::BufferView* views(size_t slot) const { return &views_[slot * kArrays]; }
  // Whether a kernel may load all of the slot's arrays as vectors of four elements.
  bool aligned4(size_t slot) const;

  // Gives the tensors of `count` slots the layout of the kernel. The caller keeps the results while the kernel runs.
  std::vector<GatheredParameter> gather(size_t first, size_t count);
  // Whether the memory of two parameters may overlap. It compares spans, and a false alarm costs only time.
  bool overlap() const;
  // Whether two parameters share a step or a moment, which then begin at the same address.
  bool share_state(const std::vector<AtenTensorHandle>& steps) const;

 private:
  size_t item(size_t array) const { return array >= kExpAvg ? moment_item_ : param_item_; }  // bytes of an element

  AdamWLists lists_;
  bool writes_grads_;
  Tensor first_;
  size_t param_item_, moment_item_ = sizeof(float);
  std::vector<AdamWSlot> slots_;
  std::vector<gpu::BufferView> views_;
};

}  // namespace metalcore

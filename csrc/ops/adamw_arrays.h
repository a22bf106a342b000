// The tensors that adamw_ is given, checked, and as the arrays that its kernel takes.
#pragma once

#include "common.h"
#include "tensor_list.h"

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace metalcore {

// Of a parameter, in this order: AdamWPointers in the kernel.
enum AdamWArray : size_t { kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kArrays };
using AdamWLists = std::array<const TensorList*, kArrays>;  // that of kMaxExpAvgSq is empty without amsgrad

// Tensors of one parameter brought to one dense layout, so that one index serves them all. Those that are not in it
// are replaced by copies; write_back() copies the results home.
class GatheredParameter {
 public:
  // Writes the views of the tensors, kArrays of them, to `views`.
  GatheredParameter(const AdamWLists& lists, size_t parameter, bool writes_grads, gpu::BufferView* views);
  void write_back();

 private:
  struct Copy {
    Tensor home, copy;
    bool written;
  };
  Tensor placed(const Tensor& tensor, Sizes strides, bool written);

  std::vector<Copy> copies_;
};

// One parameter that is not empty.
struct AdamWSlot {
  size_t parameter;  // its index in the lists
  uint64_t numel;
  bool contiguous;  // all of its tensors
};

class AdamWArrays {
 public:
  // Throws where a list does not match the parameters. The lists must outlive the object.
  AdamWArrays(const AdamWLists& lists, bool writes_grads);

  const Tensor& first() const { return first_; }  // of the parameters: others have its device and dtype
  bool amsgrad() const { return !lists_[kMaxExpAvgSq]->empty(); }
  bool narrow() const { return moment_item_ < sizeof(float); }  // moments of 16 bits, as the parameters
  const std::vector<AdamWSlot>& slots() const { return slots_; }
  // Of the slot's tensors, kArrays of them: followed by those of the next slot. Valid once gathered.
  const gpu::BufferView* views(size_t slot) const { return &views_[slot * kArrays]; }
  // Whether a kernel may take all of the slot's arrays as vectors of four.
  bool aligned4(size_t slot) const;

  // Brings the tensors of so many slots to the layout of the kernel. The results are to be kept while it runs.
  std::vector<GatheredParameter> gather(size_t first, size_t count);
  // Whether the memory of two parameters overlaps (judged by their spans: a false alarm costs time only).
  bool overlap() const;
  // Whether two parameters have one step, or one moment: tensors that begin at the same place.
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

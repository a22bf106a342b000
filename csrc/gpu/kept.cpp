// _recorded_tensors(recording) -> Tensor[] returns the tensors of a kept recording's views, in their order.
// _submit_recording(recording, replaced, by) submits it again, with each tensor of `by` in the place of the same one of
// `replaced`. It replaces the whole storage, so that other views of the storage move too.
#include "kept.h"

#include "numbered.h"
#include "record.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace metalcore::gpu {

namespace {

Numbered<KeptRecording>& kept_recordings() {
  // Never freed, because its tensors must not be freed while the process ends.
  static auto* const kept = new Numbered<KeptRecording>("recording");
  return *kept;
}

}  // namespace

int64_t keep(std::shared_ptr<KeptRecording> recording) { return kept_recordings().add(std::move(recording)); }

void forget(int64_t number) { kept_recordings().remove(number); }

std::shared_ptr<KeptRecording> kept(int64_t number) { return kept_recordings().get(number); }

namespace {

std::vector<Tensor> recorded_tensors(int64_t number) {
  std::vector<Tensor> tensors;
  for (const std::optional<Tensor>& tensor : kept(number)->tensors)
    if (tensor) tensors.push_back(*tensor);
  return tensors;
}

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw std::runtime_error("metalcore: submitting a recording again: " + (std::string(parts) + ...));
}

}  // namespace

TensorLayout::TensorLayout(const Tensor& tensor)
    : sizes(tensor.sizes().begin(), tensor.sizes().end()),
      strides(tensor.strides().begin(), tensor.strides().end()),
      dtype(tensor.scalar_type()),
      device_type(device_type_of(tensor)),
      device_index(tensor.get_device_index()),
      offset(gpu::view_of(tensor).offset) {}

BufferView TensorLayout::view_of(const Tensor& replacement) const {
  const TensorLayout found(replacement);
  require(found.sizes == sizes && found.strides == strides && found.dtype == dtype &&
              found.device_type == device_type && found.device_index == device_index,
          "a tensor must have the shape, strides, dtype and device of the one that it replaces");
  // The op chose its kernels by the alignment to 16 bytes.
  require(found.offset % 16 == offset % 16,
          "a tensor must begin at the same place within 16 bytes as the one that it replaces");
  return gpu::view_of(replacement);
}

namespace {

struct Replacement {
  BufferView old_view, new_view;
};

void submit_recording(int64_t number, const std::vector<Tensor>& replaced, const std::vector<Tensor>& by) {
  const std::shared_ptr<KeptRecording> recorded = kept(number);
  if (!recorded->submitted_for) return;  // nothing was dispatched
  require(replaced.size() == by.size(), "as many tensors must be given as are replaced");
  std::vector<Replacement> replacements;
  for (size_t i = 0; i < by.size(); ++i) {
    replacements.push_back({view_of(replaced[i]), TensorLayout(replaced[i]).view_of(by[i])});
    for (size_t j = 0; j < i; ++j)
      require(replacements[j].old_view.storage != replacements[i].old_view.storage ||
                  (replacements[j].new_view.storage == replacements[i].new_view.storage &&
                   replacements[j].new_view.offset - replacements[j].old_view.offset ==
                       replacements[i].new_view.offset - replacements[i].old_view.offset),
              "tensors that shared memory must share it in the same way");
  }
  Recording again = recorded->recording;
  for (BufferView& view : again.views())
    for (const Replacement& r : replacements)
      if (view.storage && view.storage == r.old_view.storage) {
        view.storage = r.new_view.storage;
        view.offset += r.new_view.offset - r.old_view.offset;
        break;
      }
  if (Recorder::current()) throw std::runtime_error("metalcore: a recording cannot be submitted into another one");
  submit(*recorded->submitted_for, again);
}

}  // namespace
}  // namespace metalcore::gpu

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("_recorded_tensors(int recording) -> Tensor[]");
  m.def("_submit_recording(int recording, Tensor[] replaced, Tensor[] by) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(metalcore, CompositeExplicitAutograd, m) {
  m.impl("_recorded_tensors", TORCH_BOX(&metalcore::gpu::recorded_tensors));
  m.impl("_submit_recording", TORCH_BOX(&metalcore::gpu::submit_recording));
}

// _recorded_tensors(recording) -> Tensor[] returns the tensors of a kept recording's views, in their order.
// _submit_recording(recording, replaced, by) submits it again, with each tensor of `by` in the place of the same one of
// `replaced`. It replaces the whole storage, so that other views of the storage move too.
#include "kept.h"

#include "record.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace metalcore::gpu {

namespace {

struct Kept {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<KeptRecording>> by_number;
  int64_t next = 1;
};
Kept& kept_recordings() {
  static auto* const kept = new Kept;  // never freed, because its tensors must not be freed while the process ends
  return *kept;
}

}  // namespace

int64_t keep(std::shared_ptr<KeptRecording> recording) {
  const std::lock_guard lock(kept_recordings().mutex);
  kept_recordings().by_number.emplace(kept_recordings().next, std::move(recording));
  return kept_recordings().next++;
}

void forget(int64_t number) {
  std::shared_ptr<KeptRecording> forgotten;  // freed without the lock
  const std::lock_guard lock(kept_recordings().mutex);
  if (auto found = kept_recordings().by_number.find(number); found != kept_recordings().by_number.end()) {
    forgotten = std::move(found->second);
    kept_recordings().by_number.erase(found);
  }
}

std::shared_ptr<KeptRecording> kept(int64_t number) {
  const std::lock_guard lock(kept_recordings().mutex);
  auto found = kept_recordings().by_number.find(number);
  if (found == kept_recordings().by_number.end())
    throw std::invalid_argument("metalcore: there is no recording " + std::to_string(number));
  return found->second;
}

namespace {

std::vector<Tensor> recorded_tensors(int64_t number) {
  std::vector<Tensor> tensors;
  for (const std::optional<Tensor>& tensor : kept(number)->tensors)
    if (tensor) tensors.push_back(*tensor);
  return tensors;
}

struct Replacement {
  BufferView old_view, new_view;
};

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw std::runtime_error("metalcore: submitting a recording again: " + (std::string(parts) + ...));
}

Replacement replacement(const Tensor& old_tensor, const Tensor& new_tensor) {
  const auto equal = [](const auto& a, const auto& b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
  };
  require(equal(old_tensor.sizes(), new_tensor.sizes()) && equal(old_tensor.strides(), new_tensor.strides()) &&
              old_tensor.scalar_type() == new_tensor.scalar_type() &&
              old_tensor.get_device_index() == new_tensor.get_device_index(),
          "a tensor must have the shape, strides, dtype and device of the one that it replaces");
  const Replacement found{view_of(old_tensor), view_of(new_tensor)};
  // The op chose its kernels by the alignment to 16 bytes.
  require(found.old_view.offset % 16 == found.new_view.offset % 16,
          "a tensor must begin at the same place within 16 bytes as the one that it replaces");
  return found;
}

void submit_recording(int64_t number, const std::vector<Tensor>& replaced, const std::vector<Tensor>& by) {
  const std::shared_ptr<KeptRecording> recorded = kept(number);
  if (!recorded->submitted_for) return;  // nothing was dispatched
  require(replaced.size() == by.size(), "as many tensors must be given as are replaced");
  std::vector<Replacement> replacements;
  for (size_t i = 0; i < by.size(); ++i) {
    replacements.push_back(replacement(replaced[i], by[i]));
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

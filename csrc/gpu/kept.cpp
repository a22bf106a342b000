// _recorded_tensors(recording) -> Tensor[]: what a kept recording's views are of, in their order.
// _submit_recording(recording, replaced, by): submits it again, where each tensor of `by` takes the place of the one of
// `replaced`: of its whole storage, so that views of it move along.
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
Kept& all() {
  static auto* const kept = new Kept;  // recordings hold tensors, which must not be freed as the process ends
  return *kept;
}

}  // namespace

int64_t keep(std::shared_ptr<KeptRecording> recording) {
  const std::lock_guard lock(all().mutex);
  all().by_number.emplace(all().next, std::move(recording));
  return all().next++;
}

void forget(int64_t number) {
  std::shared_ptr<KeptRecording> last;  // freed without the lock
  const std::lock_guard lock(all().mutex);
  if (auto found = all().by_number.find(number); found != all().by_number.end()) {
    last = std::move(found->second);
    all().by_number.erase(found);
  }
}

std::shared_ptr<KeptRecording> kept(int64_t number) {
  const std::lock_guard lock(all().mutex);
  auto found = all().by_number.find(number);
  if (found == all().by_number.end())
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
  BufferView old, by;
};

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw std::runtime_error("metalcore: submitting a recording again: " + (std::string(parts) + ...));
}

Replacement replacement(const Tensor& old, const Tensor& by) {
  const auto equal = [](const auto& a, const auto& b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
  };
  require(equal(old.sizes(), by.sizes()) && equal(old.strides(), by.strides()) &&
              old.scalar_type() == by.scalar_type() && old.get_device_index() == by.get_device_index(),
          "a tensor must have the shape, strides, dtype and device of the one that it replaces");
  const Replacement found{view_of(old), view_of(by)};
  // Kernels were chosen by whether rows begin at multiples of 16 bytes.
  require(found.old.offset % 16 == found.by.offset % 16,
          "a tensor must begin at the same place within 16 bytes as the one that it replaces");
  return found;
}

void submit_recording(int64_t number, const std::vector<Tensor>& replaced, const std::vector<Tensor>& by) {
  const std::shared_ptr<KeptRecording> recorded = kept(number);
  if (!recorded->on) return;  // nothing was dispatched
  require(replaced.size() == by.size(), "as many tensors must be given as are replaced");
  std::vector<Replacement> replacements;
  for (size_t i = 0; i < by.size(); ++i) {
    replacements.push_back(replacement(replaced[i], by[i]));
    for (size_t j = 0; j < i; ++j)
      require(replacements[j].old.storage != replacements[i].old.storage ||
                  (replacements[j].by.storage == replacements[i].by.storage &&
                   replacements[j].by.offset - replacements[j].old.offset ==
                       replacements[i].by.offset - replacements[i].old.offset),
              "tensors that shared memory must share it in the same way");
  }
  Recording again = recorded->recording;
  for (BufferView& view : again.views())
    for (const Replacement& r : replacements)
      if (view.storage && view.storage == r.old.storage) {
        view.storage = r.by.storage;
        view.offset += r.by.offset - r.old.offset;
        break;
      }
  if (Recorder::current()) throw std::runtime_error("metalcore: a recording cannot be submitted into another one");
  submit(*recorded->on, again);
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

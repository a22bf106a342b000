// _recorded_tensors(recording) -> Tensor[] returns the tensors of a kept recording's views, in their order.
// _submit_recording(recording, replaced, by) submits it again, with each tensor of `by` in the place of the same one of
// `replaced`. It replaces the whole storage, so that other views of the storage move too.
// _make_replay(recordings, slots) -> int joins kept recordings. _bind_replay(replay, first, by) binds slots. Python
// runs and frees replays by csrc/python/recordings.cpp.
#include "replay.h"

#include "recorder.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace metalcore::gpu {

namespace {

// Objects that Python knows by a number.
template <typename T>
class Numbered {
 public:
  explicit Numbered(const char* what) : what_(what) {}

  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    by_number_.emplace(next_, std::move(object));
    return next_++;
  }

  void remove(int64_t number) {
    std::shared_ptr<T> removed;  // freed without the lock
    const std::lock_guard lock(mutex_);
    if (auto found = by_number_.find(number); found != by_number_.end()) {
      removed = std::move(found->second);
      by_number_.erase(found);
    }
  }

  std::shared_ptr<T> get(int64_t number) {
    const std::lock_guard lock(mutex_);
    auto found = by_number_.find(number);
    if (found == by_number_.end())
      throw std::invalid_argument("metalcore: there is no " + std::string(what_) + " " + std::to_string(number));
    return found->second;
  }

 private:
  const char* const what_;
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<T>> by_number_;
  int64_t next_ = 1;
};

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

Replay::Replay(const std::vector<std::shared_ptr<KeptRecording>>& parts, const std::vector<Tensor>& slots) {
  for (const auto& part : parts) recording_.append(part->recording, 0, part->recording.dispatches().size());
  std::map<const void*, size_t> slot_of;
  for (const Tensor& tensor : slots) {
    const BufferView view = view_of(tensor);
    if (view.storage && !slot_of.emplace(view.storage, slots_.size()).second)
      throw std::invalid_argument("metalcore: two slots of a replay share memory");
    slots_.push_back({TensorLayout(tensor), {}, std::nullopt});
  }
  std::vector<BufferView>& views = recording_.views();
  for (size_t i = 0; i < views.size(); ++i) {
    BufferView& view = views[i];
    if (!view.storage) continue;
    if (const auto found = slot_of.find(view.storage); found != slot_of.end()) {
      Slot& slot = slots_[found->second];
      slot.places.push_back({i, view.offset - slot.layout.offset});
      view.tensor = nullptr;
    } else if (std::optional<Tensor> tensor = reference_to(view.tensor)) {
      view.tensor = tensor->get();
      others_.push_back(std::move(*tensor));
    } else {
      throw std::logic_error("metalcore: a recording binds memory of which it has no tensor");
    }
  }
  const auto device = std::find_if(parts.begin(), parts.end(), [](const auto& part) { return part->submitted_for; });
  if (device == parts.end() || recording_.dispatches().empty()) return;
  count_unbound();
  const Tensor& on = *(*device)->submitted_for;
  prepared_ = find_backend(device_type_of(on))->prepare(on.get_device_index(), recording_);
}

void Replay::bind(size_t first, const std::vector<Tensor>& by) {
  const std::lock_guard lock(mutex_);
  if (first > slots_.size() || by.size() > slots_.size() - first)
    throw std::invalid_argument("metalcore: a replay has no slots " + std::to_string(first) + " to " +
                                std::to_string(first + by.size()));
  std::vector<BufferView> bound;
  for (size_t i = 0; i < by.size(); ++i) bound.push_back(slots_[first + i].layout.view_of(by[i]));
  for (size_t i = 0; i < by.size(); ++i) {
    Slot& slot = slots_[first + i];
    for (const Place& place : slot.places) {
      BufferView& view = recording_.views()[place.view];
      view = {bound[i].storage, bound[i].offset + place.offset, view.span, by[i].get()};
    }
    slot.tensor = by[i];
  }
  count_unbound();
  if (prepared_) prepared_->rebound();
}

void Replay::count_unbound() {
  const auto unbound = [](const Slot& slot) { return !slot.tensor && !slot.places.empty(); };
  unbound_ = static_cast<size_t>(std::count_if(slots_.begin(), slots_.end(), unbound));
}

void Replay::run(size_t first, size_t end) {
  if (first > end || end > size()) throw std::invalid_argument("metalcore: a replay has fewer dispatches");
  if (first == end) return;
  const std::lock_guard lock(mutex_);
  if (!prepared_) throw std::logic_error("metalcore: these recordings were made on tensors without memory");
  if (unbound_) throw std::logic_error("metalcore: a slot of a replay has no memory yet");
  if (Recorder* recorder = Recorder::current()) {
    const auto& views = recording_.views();
    const auto any = std::find_if(views.begin(), views.end(), [](const BufferView& view) { return view.storage; });
    recorder->record(reference_to(any->tensor).value(), [&](Recording& into) { into.append(recording_, first, end); });
  } else {
    prepared_->submit(first, end);
  }
}

namespace {

Numbered<Replay>& replays() {
  static auto* const kept = new Numbered<Replay>("replay");  // never freed, as kept recordings
  return *kept;
}

int64_t make_replay(const std::vector<int64_t>& recordings, const std::vector<Tensor>& slots) {
  std::vector<std::shared_ptr<KeptRecording>> parts;
  for (int64_t number : recordings) parts.push_back(kept(number));
  return replays().add(std::make_shared<Replay>(parts, slots));
}

void bind_replay(int64_t number, int64_t first, const std::vector<Tensor>& by) {
  replays().get(number)->bind(static_cast<size_t>(first), by);
}

}  // namespace

std::shared_ptr<Replay> replay(int64_t number) { return replays().get(number); }

void forget_replay(int64_t number) { replays().remove(number); }

}  // namespace metalcore::gpu

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("_recorded_tensors(int recording) -> Tensor[]");
  m.def("_submit_recording(int recording, Tensor[] replaced, Tensor[] by) -> ()");
  m.def("_make_replay(int[] recordings, Tensor[] slots) -> int");
  m.def("_bind_replay(int replay, int first, Tensor[] by) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(metalcore, CompositeExplicitAutograd, m) {
  m.impl("_recorded_tensors", TORCH_BOX(&metalcore::gpu::recorded_tensors));
  m.impl("_submit_recording", TORCH_BOX(&metalcore::gpu::submit_recording));
  m.impl("_make_replay", TORCH_BOX(&metalcore::gpu::make_replay));
  m.impl("_bind_replay", TORCH_BOX(&metalcore::gpu::bind_replay));
}

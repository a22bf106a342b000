// _make_replay(recordings, slots) -> int joins kept recordings. _bind_replay(replay, first, by) binds slots. Python
// runs and frees replays by csrc/python/replays.cpp.
#include "replay.h"

#include "numbered.h"
#include "record.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace metalcore::gpu {

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
  m.def("_make_replay(int[] recordings, Tensor[] slots) -> int");
  m.def("_bind_replay(int replay, int first, Tensor[] by) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(metalcore, CompositeExplicitAutograd, m) {
  m.impl("_make_replay", TORCH_BOX(&metalcore::gpu::make_replay));
  m.impl("_bind_replay", TORCH_BOX(&metalcore::gpu::bind_replay));
}

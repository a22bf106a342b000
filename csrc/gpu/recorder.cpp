
#include "recorder.h"

#include "backend.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

namespace metalcore::gpu {

namespace {

Backend& backend_of(const Tensor& tensor) {
  const int32_t type = device_type_of(tensor);
  Backend* const backend = find_backend(type);
  if (!backend)
    throw std::runtime_error("metalcore: this build has no backend for the tensor's device (type " +
                             std::to_string(type) + ")");
  return *backend;
}

}  // namespace

bool bounds_work(const Tensor& tensor) { return backend_of(tensor).bounds_work(); }

void submit(const Tensor& output, const Recording& recording, size_t first) {
  Backend& backend = backend_of(output);
  if (first < recording.dispatches().size()) backend.submit(output.get_device_index(), recording, first);
}

thread_local Recorder* Recorder::current_ = nullptr;

Recorder::Recorder(Backend& backend) : backend_(backend), outer_(current_), kept_(std::make_shared<KeptRecording>()) {
  current_ = this;
}

Recorder::~Recorder() { current_ = outer_; }

std::optional<Tensor> reference_to(AtenTensorHandle tensor) {
  if (!tensor) return std::nullopt;
  AtenTensorHandle reference = nullptr;
  if (aoti_torch_new_tensor_handle(tensor, &reference) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("metalcore: a tensor of a recording cannot be kept");
  return Tensor(reference);
}

void Recorder::record(const Tensor& output, const std::function<void(Recording&)>& body) {
  Recording& recording = kept_->recording;
  const size_t first = recording.dispatches().size();
  std::vector<BufferView>& views = recording.views();
  recording.bound_work(backend_.bounds_work());
  try {
    body(recording);
  } catch (...) {  // the views bound so far refer to the caller's tensors
    for (size_t i = kept_->tensors.size(); i < views.size(); ++i) views[i].tensor = nullptr;
    throw;
  }
  for (size_t i = kept_->tensors.size(); i < views.size(); ++i) {
    const std::optional<Tensor>& tensor = kept_->tensors.emplace_back(reference_to(views[i].tensor));
    views[i].tensor = tensor ? tensor->get() : nullptr;
  }
  if (device_type_of(output) == aoti_torch_device_type_meta()) return;
  kept_->submitted_for = output;
  try {
    submit(output, recording, first);
  } catch (const KernelRefused&) {
    recording.forget_dispatches(first);
    throw;
  }
}

}  // namespace metalcore::gpu

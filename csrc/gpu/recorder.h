// How ops submit their dispatches, and how explain, captures and programs keep what this thread's ops submit.
#pragma once

#include "per_thread.h"
#include "recording.h"

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace metalcore::gpu {

class Backend;

// The variant that an op chose, and why. The plan is `inner` if an operator that calls this one chose before it.
struct Plan {
  std::string op, variant, why;
  bool inner;
};

// An op of PyTorch that ran between the dispatches.
struct TorchStep {
  size_t before;  // index of the dispatch after it
  std::string name;
};

struct KeptRecording {
  Recording recording;
  std::vector<Plan> plans;
  bool inside_operator = false;  // an operator has noted a plan, and has not returned
  std::vector<TorchStep> torch_steps;
  std::vector<std::string> host_steps;         // what ops did on the host, which no dispatch repeats
  std::optional<Tensor> submitted_for;         // a tensor on the device that ran the dispatches
  std::vector<std::optional<Tensor>> tensors;  // the views' tensors, in their order
};

// A reference of the caller's own to the tensor of a view; nothing where the view has none.
std::optional<Tensor> reference_to(AtenTensorHandle tensor);

// Keeps what this thread's ops record, with the reasons of their plans. Ops on tensors without memory (PyTorch's meta
// device) are recorded and not run.
class Recorder {
 public:
  // Ops on tensors without memory plan as on `backend`'s GPU.
  explicit Recorder(Backend& backend);
  ~Recorder();
  Recorder(const Recorder&) = delete;

  // The calling thread's recorder, or nullptr. Recorders of one thread nest.
  static Recorder* current() { return current_; }

  Backend& backend() const { return backend_; }
  KeptRecording& kept() { return *kept_; }
  std::shared_ptr<KeptRecording> share() const { return kept_; }

  void record(const Tensor& output, const std::function<void(Recording&)>& body);

 private:
  static thread_local Recorder* current_;

  Backend& backend_;
  Recorder* const outer_;
  std::shared_ptr<KeptRecording> kept_;
};

// Tells the recorder, if there is one, which variant an op takes. `why` makes the sentence that explain shows.
template <typename Why>
void note_plan(const char* op, const char* variant, const Why& why) {
  Recorder* const recorder = Recorder::current();
  if (!recorder) return;
  KeptRecording& kept = recorder->kept();
  kept.plans.push_back({op, variant, why(), kept.inside_operator});
  kept.inside_operator = true;
}

// Tells the recorder, if there is one, that an op changes something on the host, or takes from it what is different
// each time. Such a recording does not do what the op does when it is submitted again.
inline void note_host_step(const char* what) {
  if (Recorder* const recorder = Recorder::current()) recorder->kept().host_steps.emplace_back(what);
}

// Whether the backend for the tensor's device bounds the work of a dispatch.
bool bounds_work(const Tensor& tensor);

// Submits the dispatches from `first` on to the device of `output`.
void submit(const Tensor& output, const Recording& recording, size_t first = 0);

// Ops submit their dispatches with gpu::record(output, [&](gpu::Recording& recording) { … }). They allocate outputs and
// scratch memory before: on MPS an allocation or a PyTorch op inside the body would end PyTorch's encoder.
template <typename Body>
void record(const Tensor& output, const Body& body) {
  if (Recorder* recorder = Recorder::current()) return recorder->record(output, body);
  Spare<Recording> recording;
  (*recording).bound_work(bounds_work(output));
  body(*recording);
  submit(output, *recording);
}

}  // namespace metalcore::gpu

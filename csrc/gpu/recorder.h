// Keeps what this thread's ops record, with the reasons that plans give. Ops on tensors without memory (PyTorch's meta
// device) are recorded and not run: that is how explain asks them.
#pragma once

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

// A choice that an op made among its variants, and why. It is `inner` where another operator chose before.
struct Plan {
  std::string op, variant, why;
  bool inner;
};

// Something between the dispatches that PyTorch did.
struct TorchStep {
  size_t before;  // this dispatch
  std::string name;
};

struct KeptRecording {
  Recording recording;
  std::vector<Plan> plans;
  bool inside_operator = false;  // since an operator noted a plan
  std::vector<TorchStep> torch_steps;
  std::optional<Tensor> on;                    // a tensor on the device that the dispatches were submitted to
  std::vector<std::optional<Tensor>> tensors;  // what the views are of, in their order
};

class Recorder {
 public:
  // Plans are those of `backend`'s GPU for tensors without memory.
  explicit Recorder(Backend& backend);
  ~Recorder();
  Recorder(const Recorder&) = delete;

  // The calling thread's; nullptr where there is none. Recorders of one thread nest.
  static Recorder* current() { return current_; }

  Backend& backend() const { return backend_; }
  KeptRecording& kept() { return *kept_; }
  std::shared_ptr<KeptRecording> share() const { return kept_; }

  void record(const Tensor& on, const std::function<void(Recording&)>& body);

 private:
  static thread_local Recorder* current_;

  Backend& backend_;
  Recorder* const outer_;
  std::shared_ptr<KeptRecording> kept_;
};

// Tells a recorder, if there is one, which variant an op takes; `why` makes the sentence that explain shows.
template <typename Why>
void note_plan(const char* op, const char* variant, const Why& why) {
  Recorder* const recorder = Recorder::current();
  if (!recorder) return;
  KeptRecording& kept = recorder->kept();
  kept.plans.push_back({op, variant, why(), kept.inside_operator});
  kept.inside_operator = true;
}

}  // namespace metalcore::gpu

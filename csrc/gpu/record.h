// How ops submit: gpu::record(output, [&](gpu::Recording& recording) { … }). Outputs and scratch are allocated before:
// on MPS an allocation or a PyTorch op inside the body would end PyTorch's encoder.
#pragma once

#include "recorder.h"
#include "recording.h"

#include <memory>

namespace metalcore::gpu {

// A recording whose memory is that of this thread's last one.
class SpareRecording {
 public:
  SpareRecording();
  ~SpareRecording();
  SpareRecording(const SpareRecording&) = delete;
  Recording& operator*() { return *recording_; }

 private:
  std::unique_ptr<Recording> recording_;
};

// Submits the dispatches from `first` on to the device of `on`.
void submit(const Tensor& on, const Recording& recording, size_t first = 0);

template <typename Body>
void record(const Tensor& on, const Body& body) {
  if (Recorder* recorder = Recorder::current()) return recorder->record(on, body);
  SpareRecording recording;
  body(*recording);
  submit(on, *recording);
}

}  // namespace metalcore::gpu

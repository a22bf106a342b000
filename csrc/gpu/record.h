// Ops submit their dispatches with gpu::record(output, [&](gpu::Recording& recording) { … }). They allocate outputs and
// scratch memory before: on MPS an allocation or a PyTorch op inside the body would end PyTorch's encoder.
#pragma once

#include "recorder.h"
#include "recording.h"
#include "spare.h"

namespace metalcore::gpu {

// Whether the backend for the tensor's device bounds the work of a dispatch.
bool bounds_work(const Tensor& tensor);

// Submits the dispatches from `first` on to the device of `output`.
void submit(const Tensor& output, const Recording& recording, size_t first = 0);

template <typename Body>
void record(const Tensor& output, const Body& body) {
  if (Recorder* recorder = Recorder::current()) return recorder->record(output, body);
  Spare<Recording> recording;
  (*recording).bound_work(bounds_work(output));
  body(*recording);
  submit(output, *recording);
}

}  // namespace metalcore::gpu

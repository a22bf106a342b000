// How ops over many parameters share them out over dispatches, and record these.
#pragma once

#include "../../../kernels/optim/tensors.h"
#include "parameters.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace metalcore {

// One dispatch over tensors of a list of slots.
struct OptimDispatch {
  size_t first, count;  // slots
  uint32_t threadgroups, threads;
  OptimGrid grid;
  const gpu::BufferView* views;
  const OptimTensor* tensors;

  // Selects the kernel, and binds the table of pointers at 0 and the tensors at 1.
  gpu::Recording& begin(gpu::Recording& recording, const std::string& kernel, size_t arrays) const;
  void end(gpu::Recording& recording) const { recording.dispatch_threadgroups({threadgroups}, {threads}); }
};

// The dispatches over slots [first, first + count): as many slots to each as a table of pointers can hold.
struct OptimPlan {
  std::vector<OptimTensor> tensors;
  std::vector<OptimDispatch> dispatches;

  // Chunks are as large as a tuning row says, or larger where there would be more than `most_chunks`.
  OptimPlan(const ParameterArrays& arrays, size_t first, size_t count, uint64_t most_chunks = UINT64_MAX);
  uint32_t threadgroups() const;  // of all dispatches
};

// The pointers that a table can hold, and the parameters of `arrays` arrays each that one dispatch can take: their
// OptimTensors are bytes of the dispatch, of which Metal allows 4,096.
constexpr size_t kPointers = 512;
constexpr size_t at_most(size_t arrays) { return std::min(kPointers / arrays, 4096 / sizeof(OptimTensor)); }

std::string plan_reason(const ParameterArrays& arrays);

// Learning rate, scale of the gradients, and whether they overflow, in device memory. Each may be left out.
struct DeviceScalars {
  const MaybeTensor &lr, &grad_scale, &found_inf;

  bool any() const { return lr || grad_scale || found_inf; }
  void check(const char* op, const Tensor& reference) const;
  // Binds OptimScalarPointers.
  void bind(gpu::Recording& recording, uint32_t index) const;
};

// Records what updates the slots, in one go. Parameters that overlap or share a state are updated one after the
// other, as in PyTorch's loop, because each needs the results of the one before.
template <typename Record>
void record_updates(ParameterArrays& arrays, const Record& record) {
  const size_t slots = arrays.slots().size();
  const size_t at_once = arrays.overlap() || arrays.share_state() ? 1 : slots;
  for (size_t first = 0; first < slots; first += at_once) {
    std::vector<GatheredParameter> gathered = arrays.gather(first, at_once);
    const OptimPlan plan(arrays, first, at_once);
    gpu::record(arrays.first(), [&](gpu::Recording& recording) { record(recording, plan); });
    for (GatheredParameter& parameter : gathered) parameter.write_back();
  }
}

}  // namespace metalcore

// The interface that each kind of GPU implements. It registers itself at namespace scope of one of its files:
//   const gpu::BackendRegistration registration(backend);
#pragma once

#include "recording.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string_view>

namespace metalcore::gpu {

// The error of a submission whose kernels the GPU's own compiler refuses. Nothing of the recording has run. Operators
// (csrc/ops/common/operator.h) and kernels in the place of PyTorch's (csrc/ops/common/replacement.h) leave such a call
// to PyTorch.
struct KernelRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A recording that is submitted many times: its kernels are looked up and checked once. The recording outlives it.
class Prepared {
 public:
  virtual ~Prepared() = default;
  // Submits dispatches [first, end) to PyTorch's current stream of the device. One thread at a time calls it.
  virtual void submit(size_t first, size_t end) = 0;
  // Is called when views of the recording have changed.
  virtual void rebound() {}
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view device_type() const = 0;  // PyTorch's: "mps", "cuda"
  // The family of GPUs whose tuning plans use ("apple9", "hopper"), or "" if nobody has tuned for it. It may change
  // while the process runs.
  virtual std::string_view family() = 0;
  // The cores of the GPU that plans are for, or 0 where that is not known (yet).
  virtual uint32_t cores() { return 0; }
  // Whether its GPUs have units that multiply tensors, where their family has.
  virtual bool multiplies_tensors() { return true; }
  // Whether these units also multiply what threads hold.
  virtual bool multiplies_held_tensors() { return true; }
  // The most threadgroups that a GPU runs at the same time so that they read each other's threadgroup memory
  // (Recording::together). A plan without a GPU has -1 in the place of its number.
  virtual uint32_t most_together(int /*device_index*/) { return 1; }
  // Submits the recording's dispatches from `first` on to PyTorch's current stream of a device. If the
  // backend can find an error before, it submits none of them. Throws KernelRefused where the GPU's
  // compiler refuses one of the kernels.
  virtual void submit(int device_index, const Recording& recording, size_t first) = 0;
  // Throws what submit() throws before it submits anything.
  virtual std::unique_ptr<Prepared> prepare(int device_index, const Recording& recording) = 0;

  // Whether the system aborts work that keeps the GPU for seconds, so that ops split theirs (cost.h).
  virtual bool bounds_work() const { return false; }

  // Whether this machine's own tuning has been looked for (tunable.h).
  std::atomic<bool> asked_for_measured = false;
  // Whether tuning rows know cores().
  std::atomic<bool> counted_cores = false;
};

struct BackendRegistration {
  explicit BackendRegistration(Backend& backend);
};

// The backend for a device type, by PyTorch's name or number, or nullptr if this build has none.
Backend* find_backend(std::string_view device_type);
Backend* find_backend(int32_t device_type);

}  // namespace metalcore::gpu

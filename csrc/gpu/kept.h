// Recordings that outlive their op. Python names them by a number to show, compare and submit them again.
#pragma once

#include "recorder.h"

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace metalcore::gpu {

int64_t keep(std::shared_ptr<KeptRecording> recording);
void forget(int64_t number);
// Throws std::invalid_argument if no recording has this number.
std::shared_ptr<KeptRecording> kept(int64_t number);

// What kernels were chosen by: a tensor that takes the place of another one must have the same layout.
struct TensorLayout {
  explicit TensorLayout(const Tensor& tensor);
  // The view of a tensor in the place. Throws std::runtime_error where the tensor has another layout.
  BufferView view_of(const Tensor& replacement) const;

  std::vector<int64_t> sizes, strides;
  torch::headeronly::ScalarType dtype;
  int32_t device_type, device_index;
  size_t offset;  // in the storage, in bytes
};

}  // namespace metalcore::gpu

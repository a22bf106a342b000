// NVIDIA's gpu::Encoder: what `body` encodes is recorded and then launched on PyTorch's current stream of the device.
#pragma once

#include "../../gpu/encoder.h"

#include <functional>

namespace metalcore::cuda {

void encode(int device, const std::function<void(gpu::Encoder&)>& body);

}  // namespace metalcore::cuda

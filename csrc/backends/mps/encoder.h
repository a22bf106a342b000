// gpu::Encoder on PyTorch's MPS stream. Dispatches are encoded, not run: nothing here commits or waits.
#pragma once

#include "../../gpu/encoder.h"

#include <functional>
#include <string>

namespace metalcore::mps {

void encode(const std::function<void(gpu::Encoder&)>& body);

// "apple9" and the like: the newest of Apple's GPU families that the GPU belongs to; "" where there is none.
const std::string& gpu_family();

}  // namespace metalcore::mps

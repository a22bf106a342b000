// The simulator's gpu::Encoder: each dispatch runs to its end before dispatch_…() returns.
#pragma once

#include "../../gpu/encoder.h"

#include <functional>

namespace metalcore::simulator {

void encode(const std::function<void(gpu::Encoder&)>& body);

}  // namespace metalcore::simulator

#pragma once

#include <string>

namespace metalcore::mps {

// "apple9" and the like: the newest of Apple's GPU families that the GPU belongs to; "" where there is none.
const std::string& gpu_family();

}  // namespace metalcore::mps

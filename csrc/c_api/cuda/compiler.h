// The compiler of kernels for NVIDIA GPUs without Python.
#pragma once

namespace metalcore::c_api {

// Throws Error where the programs, their headers or NVRTC are missing.
void require_compiler();

}  // namespace metalcore::c_api

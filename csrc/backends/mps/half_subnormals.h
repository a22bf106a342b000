// Whether a GPU keeps float16's subnormal numbers, which the decoding of packed weights counts on.
#pragma once

#import <Metal/Metal.h>

#include <string>

namespace metalcore::mps {

// The built-in kernel that tells it, and its family.
constexpr const char* kHalfSubnormals = "half_subnormals";
constexpr const char* kHalfSubnormalsFamily = "quant/subnormals";

// The macro of kernels/quant/formats.h. A program that has it is compiled with 0 where subnormal numbers become zero.
constexpr const char* kHalfSubnormalsMacro = "METALCORE_HALF_SUBNORMALS";

// Runs that kernel, and waits for it. True where the GPU gives no answer: by public reports Apple's GPUs keep them.
bool keeps_half_subnormals(id<MTLDevice> device, id<MTLComputePipelineState> kernel);

}  // namespace metalcore::mps

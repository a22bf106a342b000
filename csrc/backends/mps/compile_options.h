// How Metal compiles kernels: every GPU gives the results of the source as it is written. (tools/build/metal_kernels.py
// has the same for the binaries.)
#pragma once

#import <Metal/Metal.h>

namespace metalcore::mps {

// The object is autoreleased.
MTLCompileOptions* compile_options();

}  // namespace metalcore::mps

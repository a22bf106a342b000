// The GPU, where no stream of PyTorch's tells it.
#pragma once

#import <Metal/Metal.h>

#include <cstdint>
#include <string>

namespace metalcore::mps {

// The first device of the system, which PyTorch takes too; where the system lists none, as virtual machines and
// processes without a display may, its default device; nil where that is missing as well. The caller owns the object.
// (The default device alone would not do: it needs CoreGraphics, which a process of ssh, tmux, launchd or a CI job may
// not have.)
id<MTLDevice> copy_device() NS_RETURNS_RETAINED;

// The GPU's cores, by IOKit's registry; 0 where it has none.
uint32_t gpu_cores();

// "apple9" and the like: the newest of Apple's GPU families that the GPU belongs to; "" while none is found.
const std::string& gpu_family();

}  // namespace metalcore::mps

// The functions that PyTorch asks of a device besides its operators.
#pragma once

namespace metalcore::simulated_device {

// Streams, events and devices (c10's device guard).
void install_guard();
// torch.mps.*, torch.accelerator.*, generators, pinned memory (ATen's MPSHooks).
void install_hooks();
// A CUDA build that finds no GPU still claims to be the accelerator, and PyTorch allows one accelerator only.
void hide_cuda();

double now_milliseconds();

}  // namespace metalcore::simulated_device

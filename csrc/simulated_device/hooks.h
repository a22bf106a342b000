// What PyTorch asks of a device besides its operators: hooks, random numbers, a thread of the autograd engine.
#pragma once

#include <ATen/core/Generator.h>

namespace metalcore::simulated_device {

// The random numbers of the simulated device. It has a CPU generator of its own, so a seed gives the CPU's numbers.
const at::Generator& default_generator();
at::Generator new_generator();
// The CPU generator behind a generator of the device.
const at::Generator& cpu_generator(const at::Generator& generator);

// Streams, events and devices (c10's device guard).
void install_guard();
// torch.mps.*, torch.accelerator.*, generators, pinned memory (ATen's MPSHooks).
void install_hooks();
// A CUDA build that finds no GPU still claims to be the accelerator, and PyTorch allows one accelerator only.
void hide_cuda();

double now_milliseconds();

// The autograd engine has a thread for each accelerator device. It counts devices at its first backward(): where that
// came before the device, the device never gets a thread.
bool autograd_started_without_device();

// Waits until the device's thread has dropped everything that it held for past backward() calls. The thread does this
// after backward() has returned, and needs Python for it, so Python must not have ended by then.
void drain_autograd();

}  // namespace metalcore::simulated_device

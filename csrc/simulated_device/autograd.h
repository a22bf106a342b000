// The autograd engine has one thread for each accelerator device, with a life of its own.
#pragma once

namespace metalcore::simulated_device {

// The engine counts devices at its first backward(); one that ran before the device existed will never have a thread.
bool autograd_started_without_device();

// Waits until the device's thread has dropped everything it held for past backward() calls. It does so after
// backward() has returned and needs Python for it, which must not be gone by then.
void drain_autograd();

}  // namespace metalcore::simulated_device

// The autograd engine has a thread for each accelerator device. Two things about that thread matter here.
#pragma once

namespace metalcore::simulated_device {

// The engine counts devices at its first backward(): where that came before the device, the device never gets a thread.
bool autograd_started_without_device();

// Waits until the device's thread has dropped everything that it held for past backward() calls. The thread does this
// after backward() has returned, and needs Python for it, so Python must not have ended by then.
void drain_autograd();

}  // namespace metalcore::simulated_device

// The memory of the simulated device: host memory, with an account like Metal's of how much is in use.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>

namespace metalcore::simulated_device {

inline const c10::Device kDevice(c10::kMPS, 0);

c10::Allocator* device_allocator();
// torch.Tensor.pin_memory(): ordinary host memory whose addresses are remembered, so that is_pinned() tells the truth.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

// Hands the memory of a CPU storage to the device without copying it.
c10::DataPtr adopt(c10::StorageImpl* cpu);

// Returns the size of the allocation that holds this address and sets its beginning; 0 where there is none.
size_t find_allocation(uintptr_t address, uintptr_t* begin);
// Sets the addresses between which all allocations lie.
void range_of_allocations(uintptr_t* low, uintptr_t* high);

size_t allocated_bytes();
size_t physical_memory();
// Allocations beyond fraction * physical_memory() fail; 0 lifts the limit.
void set_memory_fraction(double fraction);

}  // namespace metalcore::simulated_device

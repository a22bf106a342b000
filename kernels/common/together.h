// On some NVIDIA GPUs several threadgroups run at the same time and read each other's threadgroup memory, where a
// recording says so (together() in csrc/gpu/recording.h). Elsewhere a threadgroup is alone.
// NVIDIA's headers have the same functions for an int in the place of the long.
#pragma once

#include <metal_stdlib>

// A barrier of all their threads, behind which the threadgroup memory that they wrote before can be read.
METAL_FUNC void metalcore_synchronize_together(long) { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }

// The last such barrier, behind which nobody reads the threadgroup's memory any more. Writes to device memory do not
// wait for it.
METAL_FUNC void metalcore_leave_together(long) {}

// What another threadgroup has at an address of threadgroup memory.
METAL_FUNC metal::float2 metalcore_load_together(threadgroup const metal::float2* address, uint, long) {
  return *address;
}
METAL_FUNC metal::float4 metalcore_load_together(threadgroup const metal::float4* address, uint, long) {
  return *address;
}

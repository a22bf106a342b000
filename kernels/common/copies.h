// Copies of tiles that a threadgroup waits for later. A compiler's headers may have functions that are the same except
// for an `int` as their last parameter, which a call with 0 then means (see matrices.h). Those for NVIDIA GPUs copy
// while the threadgroup works, and have more threadgroup memory than a kernel can declare. Here a copy ends at once.
#pragma once

#include "pack.h"
#include <metal_stdlib>

// Begins to copy 16 bytes. Both places begin at multiples of 16 bytes.
template <typename T>
METAL_FUNC void metalcore_copy_pack(threadgroup T* to, device const T* from, long) {
  *reinterpret_cast<threadgroup Pack<T>*>(to) = *reinterpret_cast<device const Pack<T>*>(from);
}

// Asks for the memory around an element, which a later load finds in a cache.
template <typename T>
METAL_FUNC void metalcore_prefetch(device const T* from, long) {}

// Waits for the copies that this thread has begun. Other threads see them behind a barrier.
METAL_FUNC void metalcore_await_copies(long) {}

// Returns memory of so many bytes: the tile, which a kernel has declared with them.
template <uint kBytes, typename T>
METAL_FUNC threadgroup T* metalcore_memory_of_tile(threadgroup T* tile, long) {
  return tile;
}

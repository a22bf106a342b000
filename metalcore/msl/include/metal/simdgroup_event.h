// Copies between threadgroup and device memory by a whole simdgroup. Apple's compiler names them
// air.simdgroup_async_copy, and programs declare them themselves (metal-flash-attention's simdgroup_event). Here the
// lanes copy at once.
#pragma once

#include "metal/simdgroup.h"
#include "metal/synchronize.h"
#include "metal/types.h"

namespace msl {

// The result of such a copy, which converts to the program's pointer to an event.
struct Event {
  template <class T>
  METAL_FUNC operator T*() const { return nullptr; }
};

METAL_FUNC void copy_element(void* to, const void* from, uint64_t size) {
  if (size == 4) __builtin_memcpy(to, from, 4);
  else if (size == 2) __builtin_memcpy(to, from, 2);
  else if (size == 8) __builtin_memcpy(to, from, 8);
  else if (size == 16) __builtin_memcpy(to, from, 16);
  else for (uint64_t i = 0; i < size; ++i) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
}

}  // namespace msl

// The lanes that call it share the elements.
METAL_FUNC msl::Event __metal_simdgroup_async_copy_1d(uint64_t size, uint64_t, void* to, const void* from,
                                                      uint64_t count, uint32_t line = __builtin_LINE()) {
  const uint32_t lanes = metal::simd_sum(1u, line), lane = metal::simd_prefix_exclusive_sum(1u, line);
  for (uint64_t i = lane; i < count; i += lanes)
    msl::copy_element(static_cast<char*>(to) + i * size, static_cast<const char*>(from) + i * size, size);
  return {};
}

// Copies tiles of to_tile and from_tile elements (x goes along a row). Elements outside of the source are zero, or for
// mode 1 the nearest element. In all known programs an element's stride is 1 and the offset is 0.
METAL_FUNC msl::Event __metal_simdgroup_async_copy_2d(uint64_t size, uint64_t, void* to, uint64_t to_row,
                                                      uint64_t to_stride, metal::vec<ulong, 2> to_tile,
                                                      const void* from, uint64_t from_row, uint64_t from_stride,
                                                      metal::vec<ulong, 2> from_tile, metal::vec<long, 2> offset,
                                                      int mode, uint32_t line = __builtin_LINE()) {
  if (to_stride != 1 || from_stride != 1 || offset.x != 0 || offset.y != 0) msl::fault();
  const uint32_t lanes = metal::simd_sum(1u, line), lane = metal::simd_prefix_exclusive_sum(1u, line);
  const uint64_t width = to_tile.x, width_there = from_tile.x, height_there = from_tile.y;
  for (uint64_t i = lane; i < width * to_tile.y; i += lanes) {
    uint64_t x = i % width, y = i / width;
    char* element = static_cast<char*>(to) + (y * to_row + x) * size;
    const bool inside = x < width_there && y < height_there;
    if (!inside && (mode != 1 || width_there == 0 || height_there == 0)) {
      for (uint64_t byte = 0; byte < size; ++byte) element[byte] = 0;
      continue;
    }
    x = x < width_there ? x : width_there - 1, y = y < height_there ? y : height_there - 1;
    msl::copy_element(element, static_cast<const char*>(from) + (y * from_row + x) * size, size);
  }
  return {};
}

template <class Event>
METAL_FUNC void __metal_wait_simdgroup_events(int, Event**, uint32_t line = __builtin_LINE()) {
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup, line);
}

// Functions across the 32 lanes of a simdgroup and across the 4 lanes of a quad. target/lanes.h exchanges the values.
#pragma once

#include "metal/synchronize.h"
#include "metal/types.h"
#include "target/lanes.h"

namespace msl {

// The vector or scalar that a lane function works on. Packed vectors are unpacked.
template <class T>
using lane_value_t = plain_t<T>;

}  // namespace msl

// The functions that simdgroups and quads share, for prefix = simd, Width = 32 and prefix = quad, Width = 4.
#define MSL_REDUCTION(prefix_, Width, name, Operation)                                                     \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_##name(T data, uint32_t line = __builtin_LINE()) {                                \
    return msl::reduce<Width, msl::Operation, V>(data, line);                                              \
  }
#define MSL_PREFIX(prefix_, Width, name, Operation, identity, inclusive)                                   \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_##name(T data, uint32_t line = __builtin_LINE()) {                                \
    return msl::prefix<Width, msl::Operation, V>(data, V(identity), inclusive, line);                      \
  }
#define MSL_FETCH(prefix_, Width, name, Source)                                                            \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_##name(T data, ushort n, uint32_t line = __builtin_LINE()) {                      \
    return msl::fetch<Width, msl::Source, V>(data, n, line);                                               \
  }
#define MSL_GROUP_FUNCTIONS(prefix_, Width)                                                                \
  MSL_REDUCTION(prefix_, Width, sum, Sum)                                                                  \
  MSL_REDUCTION(prefix_, Width, product, Product)                                                          \
  MSL_REDUCTION(prefix_, Width, min, Min)                                                                  \
  MSL_REDUCTION(prefix_, Width, max, Max)                                                                  \
  MSL_REDUCTION(prefix_, Width, and, And)                                                                  \
  MSL_REDUCTION(prefix_, Width, or, Or)                                                                    \
  MSL_REDUCTION(prefix_, Width, xor, Xor)                                                                  \
  MSL_PREFIX(prefix_, Width, prefix_inclusive_sum, Sum, 0, true)                                           \
  MSL_PREFIX(prefix_, Width, prefix_exclusive_sum, Sum, 0, false)                                          \
  MSL_PREFIX(prefix_, Width, prefix_inclusive_product, Product, 1, true)                                   \
  MSL_PREFIX(prefix_, Width, prefix_exclusive_product, Product, 1, false)                                  \
  MSL_FETCH(prefix_, Width, shuffle, Given)                                                                \
  MSL_FETCH(prefix_, Width, shuffle_up, Lower)                                                             \
  MSL_FETCH(prefix_, Width, shuffle_down, Upper)                                                           \
  MSL_FETCH(prefix_, Width, shuffle_xor, Flipped)                                                          \
  MSL_FETCH(prefix_, Width, shuffle_rotate_up, RotatedUp)                                                  \
  MSL_FETCH(prefix_, Width, shuffle_rotate_down, RotatedDown)                                              \
  MSL_FETCH(prefix_, Width, broadcast, Given)                                                              \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_broadcast_first(T data, uint32_t line = __builtin_LINE()) {                       \
    return msl::fetch_first<Width, V>(data, line);                                                         \
  }                                                                                                        \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_shuffle_and_fill_up(T data, T filling, ushort delta, ushort modulo = Width,       \
                                             uint32_t line = __builtin_LINE()) {                           \
    return msl::fill<Width, V>(data, filling, -int(delta), modulo, line);                                  \
  }                                                                                                        \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_shuffle_and_fill_down(T data, T filling, ushort delta, ushort modulo = Width,     \
                                               uint32_t line = __builtin_LINE()) {                         \
    return msl::fill<Width, V>(data, filling, int(delta), modulo, line);                                   \
  }                                                                                                        \
  METAL_FUNC prefix_##_vote prefix_##_ballot(bool value, uint32_t line = __builtin_LINE()) {               \
    return prefix_##_vote(msl::ballot<Width>(value, line));                                                \
  }                                                                                                        \
  METAL_FUNC prefix_##_vote prefix_##_active_threads_mask(uint32_t line = __builtin_LINE()) {              \
    return prefix_##_vote(msl::ballot<Width>(true, line));                                                 \
  }                                                                                                        \
  METAL_FUNC bool prefix_##_all(bool value, uint32_t line = __builtin_LINE()) {                            \
    return msl::ballot<Width>(!value, line) == 0;                                                          \
  }                                                                                                        \
  METAL_FUNC bool prefix_##_any(bool value, uint32_t line = __builtin_LINE()) {                            \
    return msl::ballot<Width>(value, line) != 0;                                                           \
  }                                                                                                        \
  METAL_FUNC bool prefix_##_is_first(uint32_t line = __builtin_LINE()) {                                   \
    return msl::is_first<Width>(line);                                                                     \
  }                                                                                                        \
  METAL_FUNC bool prefix_##_is_helper_thread() { return false; }

namespace metal {

// One bit for each lane of the group.
template <class Bits, uint32_t Width>
struct lane_vote {
  using vote_t = Bits;

  lane_vote() = default;
  METAL_FUNC explicit constexpr lane_vote(vote_t bits) : bits(bits) {}
  METAL_FUNC constexpr operator vote_t() const { return bits; }
  METAL_FUNC constexpr bool all() const { return (bits & everyone) == everyone; }
  METAL_FUNC constexpr bool any() const { return bits != 0; }

 private:
  static constexpr vote_t everyone = (vote_t(1) << Width) - 1;
  vote_t bits;
};

using simd_vote = lane_vote<uint64_t, msl::kSimd>;
using quad_vote = lane_vote<uint64_t, msl::kQuad>;

MSL_GROUP_FUNCTIONS(simd, msl::kSimd)
MSL_GROUP_FUNCTIONS(quad, msl::kQuad)

}  // namespace metal

#undef MSL_GROUP_FUNCTIONS
#undef MSL_FETCH
#undef MSL_PREFIX
#undef MSL_REDUCTION

// Copies between threadgroup and device memory by a whole simdgroup. Apple's compiler names them
// air.simdgroup_async_copy, and programs declare them themselves (metal-flash-attention's simdgroup_event). Here the
// lanes copy at once.
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

// Functions across the 32 lanes of a simdgroup and across the 4 lanes of a quad. target/lanes.h exchanges the values.
#pragma once

#include "metal/synchronize.h"
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

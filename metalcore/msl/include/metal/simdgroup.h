// Functions across the 32 lanes of a simdgroup. Each lane publishes its value through the executor and computes its own
// result from what the active lanes published.
#pragma once

#include "metal/synchronize.h"

namespace msl {

constexpr uint32_t kSimd = msl_abi::kSimdWidth;
constexpr uint32_t kQuad = 4;

// What the active lanes of this lane's group published. Lanes are numbered within the simdgroup.
template <class T>
struct Lanes {
  msl_abi::Exchange exchange;
  uint32_t lane;

  METAL_FUNC bool active(uint32_t i) const { return i < kSimd && (exchange.active >> i & 1); }
  METAL_FUNC T operator[](uint32_t i) const {
    T value;
    __builtin_memcpy(&value, exchange.values + size_t(i) * msl_abi::exchange_stride(sizeof(T)), sizeof(T));
    return value;
  }
};

template <class T>
METAL_FUNC Lanes<T> publish(const T& value, uint32_t width, uint32_t line) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 128);
  return {runtime->simd_exchange(&value, sizeof(T), width, line), self().lane};
}

template <uint32_t Width>
METAL_FUNC uint32_t group_start(uint32_t lane) {
  return lane & ~(Width - 1);
}

// Combines 2 N values as a tree; loops of known length, for the vectorizer.
template <uint32_t N, class T, class F>
METAL_FUNC T combine_tree(T* values, F combine) {
  for (uint32_t i = 0; i < N; ++i) values[i] = combine(values[i], values[i + N]);
  if constexpr (N > 1) return combine_tree<N / 2>(values, combine);
  return values[0];
}

// Combines the values of all active lanes of the group.
template <uint32_t Width, class T, class F>
METAL_FUNC T reduce(const T& value, uint32_t line, F combine) {
  Lanes<T> lanes = publish(value, Width, line);
  uint32_t start = group_start<Width>(lanes.lane);
  constexpr uint32_t everyone = Width == 32 ? ~0u : (1u << (Width & 31)) - 1;
  uint32_t remaining = lanes.exchange.active >> start & everyone;
  if (remaining == everyone) {
    T partial[Width / 2];
    for (uint32_t i = 0; i < Width / 2; ++i) partial[i] = combine(lanes[start + i], lanes[start + i + Width / 2]);
    return combine_tree<Width / 4>(partial, combine);
  }
  T result = lanes[start + __builtin_ctz(remaining)];
  for (remaining &= remaining - 1; remaining; remaining &= remaining - 1)
    result = combine(result, lanes[start + __builtin_ctz(remaining)]);
  return result;
}

// Combines the values of the active lanes up to (or before) this one, beginning with `identity`.
template <uint32_t Width, class T, class F>
METAL_FUNC T prefix(const T& value, uint32_t line, const T& identity, bool inclusive, F combine) {
  Lanes<T> lanes = publish(value, Width, line);
  T result = identity;
  for (uint32_t i = group_start<Width>(lanes.lane); i < lanes.lane; ++i)
    if (lanes.active(i)) result = combine(result, lanes[i]);
  return inclusive ? combine(result, value) : result;
}

// The value of lane `source`; this lane's own where that lane is inactive or outside the group (MSL leaves it open).
template <uint32_t Width, class T>
METAL_FUNC T fetch(const T& value, uint32_t line, uint32_t (*source)(uint32_t lane, uint32_t argument), uint32_t argument) {
  Lanes<T> lanes = publish(value, Width, line);
  uint32_t start = group_start<Width>(lanes.lane);
  uint32_t from = source(lanes.lane - start, argument);
  return from < Width && lanes.active(start + from) ? lanes[start + from] : value;
}

// Bit i is set where active lane i of the group passed true.
template <uint32_t Width>
METAL_FUNC uint32_t ballot(bool value, uint32_t line) {
  Lanes<uint8_t> lanes = publish(uint8_t(value), Width, line);
  uint32_t start = group_start<Width>(lanes.lane);
  uint32_t result = 0;
  for (uint32_t i = 0; i < Width; ++i)
    if (lanes.active(start + i)) result |= uint32_t(lanes[start + i]) << i;
  return result;
}

// The vector or scalar a lane function works on; packed vectors are unpacked.
template <class T>
using lane_value_t = plain_t<T>;

// Rotation and filling within blocks of `modulo` lanes.
template <uint32_t Width, class T>
METAL_FUNC T fill(const T& value, const T& filling, int delta, uint32_t modulo, uint32_t line) {
  struct Pair {
    T value, filling;
  };
  Lanes<Pair> lanes = publish(Pair{value, filling}, Width, line);
  uint32_t block = lanes.lane & ~(modulo - 1);
  int from = int(lanes.lane - block) + delta;
  bool inside = from >= 0 && from < int(modulo);
  uint32_t source = block + (uint32_t(from) & (modulo - 1));
  if (!lanes.active(source)) return value;
  return inside ? lanes[source].value : lanes[source].filling;
}

template <class T, class F>
METAL_FUNC auto combine_elements(F f) {
  return [=](const T& a, const T& b) METAL_LAMBDA { return T(map_all(f, a, b)); };
}

struct Sum { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a + b); } };
struct Product { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a * b); } };
struct And { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a & b); } };
struct Or { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a | b); } };
struct Xor { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a ^ b); } };
// A NaN loses against a number, as in metal::min and metal::max.
struct Min { template <class T> METAL_FUNC T operator()(T a, T b) const { return b < a || a != a ? b : a; } };
struct Max { template <class T> METAL_FUNC T operator()(T a, T b) const { return a < b || a != a ? b : a; } };

}  // namespace msl

// The functions that simdgroups and quads share, for prefix = simd, Width = 32 and prefix = quad, Width = 4.
#define MSL_REDUCTION(prefix_, Width, name, Operation)                                                     \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_##name(T data, uint32_t line = __builtin_LINE()) {                                \
    return msl::reduce<Width, V>(data, line, msl::combine_elements<V>(msl::Operation()));                  \
  }
#define MSL_PREFIX(prefix_, Width, name, Operation, identity, inclusive)                                   \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_##name(T data, uint32_t line = __builtin_LINE()) {                                \
    return msl::prefix<Width, V>(data, line, V(identity), inclusive,                                       \
                                 msl::combine_elements<V>(msl::Operation()));                              \
  }
#define MSL_FETCH(prefix_, Width, name, expression)                                                        \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_##name(T data, ushort n, uint32_t line = __builtin_LINE()) {                      \
    return msl::fetch<Width, V>(data, line, [](uint32_t lane, uint32_t n) -> uint32_t { return expression; }, n); \
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
  MSL_FETCH(prefix_, Width, shuffle, n)                                                                    \
  MSL_FETCH(prefix_, Width, shuffle_up, lane - n)                                                          \
  MSL_FETCH(prefix_, Width, shuffle_down, lane + n)                                                        \
  MSL_FETCH(prefix_, Width, shuffle_xor, lane ^ n)                                                         \
  MSL_FETCH(prefix_, Width, shuffle_rotate_up, (lane - n) & (Width - 1))                                   \
  MSL_FETCH(prefix_, Width, shuffle_rotate_down, (lane + n) & (Width - 1))                                 \
  MSL_FETCH(prefix_, Width, broadcast, n)                                                                  \
  template <class T, class V = msl::lane_value_t<T>>                                                       \
  METAL_FUNC V prefix_##_broadcast_first(T data, uint32_t line = __builtin_LINE()) {                       \
    msl::Lanes<V> lanes = msl::publish<V>(data, Width, line);                                              \
    uint32_t start = msl::group_start<Width>(lanes.lane);                                                  \
    return lanes[start + __builtin_ctz(lanes.exchange.active >> start)];                                   \
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
    uint32_t lane = msl::self().lane;                                                                      \
    return lane - msl::group_start<Width>(lane) == uint32_t(__builtin_ctz(msl::ballot<Width>(true, line))); \
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

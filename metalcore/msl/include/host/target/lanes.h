// How lanes exchange values on the host: each lane publishes its value through the executor, and computes its own
// result from the values that the active lanes published.
#pragma once

#include "metal/lane_operations.h"

namespace msl {

constexpr uint32_t kNobody = kSimd;

// The values that the active lanes of this lane's group published. Lanes are numbered within the simdgroup. The value
// of an inactive lane, and of kNobody, is zeros.
template <class T>
struct Lanes {
  msl_abi::Exchange exchange;
  uint32_t lane;

  METAL_FUNC bool active(uint32_t i) const { return exchange.active >> i & 1; }
  METAL_FUNC T operator[](uint32_t i) const {
    const unsigned char* slot = exchange.values + size_t(i) * msl_abi::exchange_stride(sizeof(T));
    if constexpr (sizeof(T) > 16) return *reinterpret_cast<const T*>(slot);  // checking mode sees no memcpy of so much
    T value;
    __builtin_memcpy(&value, slot, sizeof(T));
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

// Combines 2 N values as a tree. Its loops have constant lengths, for the vectorizer.
template <uint32_t N, class Operation, class T>
METAL_FUNC T combine_tree(T* values) {
  for (uint32_t i = 0; i < N; ++i) values[i] = combine<Operation>(values[i], values[i + N]);
  if constexpr (N > 1) return combine_tree<N / 2, Operation>(values);
  return values[0];
}

// Combines the values of all active lanes of the group.
template <uint32_t Width, class Operation, class T>
METAL_FUNC T reduce(const T& value, uint32_t line) {
  Lanes<T> lanes = publish(value, Width, line);
  uint32_t start = group_start<Width>(lanes.lane);
  constexpr uint32_t everyone = Width == 32 ? ~0u : (1u << (Width & 31)) - 1;
  uint32_t remaining = lanes.exchange.active >> start & everyone;
  if (remaining == everyone) {
    T partial[Width / 2];
    for (uint32_t i = 0; i < Width / 2; ++i)
      partial[i] = combine<Operation, T>(lanes[start + i], lanes[start + i + Width / 2]);
    return combine_tree<Width / 4, Operation>(partial);
  }
  T result = lanes[start + __builtin_ctz(remaining)];
  for (remaining &= remaining - 1; remaining; remaining &= remaining - 1)
    result = combine<Operation, T>(result, lanes[start + __builtin_ctz(remaining)]);
  return result;
}

// Combines the values of the active lanes up to (or before) this one, beginning with `identity`.
template <uint32_t Width, class Operation, class T>
METAL_FUNC T prefix(const T& value, const T& identity, bool inclusive, uint32_t line) {
  Lanes<T> lanes = publish(value, Width, line);
  T result = identity;
  for (uint32_t i = group_start<Width>(lanes.lane); i < lanes.lane; ++i)
    if (lanes.active(i)) result = combine<Operation, T>(result, lanes[i]);
  return inclusive ? combine<Operation, T>(result, value) : result;
}

// The value of the lane that Source chooses. Where the group has no such lane, the result is this lane's own value if
// Source keeps that, and kNobody's otherwise.
template <uint32_t Width, class Source, class T>
METAL_FUNC T fetch(const T& value, uint32_t n, uint32_t line) {
  Lanes<T> lanes = publish(value, Width, line);
  uint32_t start = group_start<Width>(lanes.lane);
  uint32_t from = Source::source_lane(lanes.lane - start, n, Width);
  if (Source::keeps && from >= Width) return value;
  return lanes[from < Width ? start + from : kNobody];
}

// The value of the first active lane.
template <uint32_t Width, class T>
METAL_FUNC T fetch_first(const T& value, uint32_t line) {
  Lanes<T> lanes = publish(value, Width, line);
  uint32_t start = group_start<Width>(lanes.lane);
  return lanes[start + __builtin_ctz(lanes.exchange.active >> start)];
}

// The value of the lane `delta` lanes further in the block of `modulo` lanes, or its filling where the block ends
// before.
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
  return inside ? lanes[source].value : lanes[source].filling;
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

// Whether this is the first active lane of the group.
template <uint32_t Width>
METAL_FUNC bool is_first(uint32_t line) {
  uint32_t lane = self().lane;
  return lane - group_start<Width>(lane) == uint32_t(__builtin_ctz(ballot<Width>(true, line)));
}

}  // namespace msl

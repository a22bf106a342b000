// How lanes exchange values on CUDA: by shuffles within the warp. The active lanes take part. A program whose whole
// simdgroups always come here, and which names only lanes that exist, promises so by MSL_CONVERGENT; then the active
// lanes need not be found.
#pragma once

#include "metal/lane_operations.h"
#include "target/runtime.h"

// How the lanes of a simdgroup are numbered. In programs with simdgroup_matrix (MSL_MATRIX_LANES) the warp's lanes are
// numbered such that a lane's two elements of a matrix, whose place Metal fixes, are those that the tensor cores give
// it: bits 1 and 3 of its number change places. The column is then bits 3 and 0 of the program's lane, and bits 1 and 0
// of the warp's. The row is bits 4, 2 and 1 of the program's, and bits 4, 2 and 3 of the warp's. Tensor cores have it in
// bits 4, 3 and 2. They may have rows in another order, since the left matrix and the sum have the same, and in this one
// eight lanes that store 16 bytes each to a tile of 16 columns meet in no bank. A threadgroup's last, short simdgroup
// cannot multiply matrices and keeps the warp's order, in which the missing lanes are the last ones.
//
// Fragments of cooperative tensors have the same bits of the program's lane, and four neighbours of a row for a lane. In
// programs that multiply what lanes hold (MSL_FRAGMENT_LANES) bits 4, 2 and 1 of the program's lane are bits 3, 4 and 2
// of the warp's: see held_products.h.
namespace msl {

#ifdef MSL_NUMBERED_LANES

METAL_FUNC bool is_renumbered() {
#ifdef MSL_CONVERGENT
  return true;  // only whole simdgroups ask
#else
  return is_in_whole_warp();
#endif
}

// The warp's lane that is the program's lane `lane`. It also holds for the exclusive or of two lanes.
METAL_FUNC uint32_t hardware_lane(uint32_t lane) {
  if (!is_renumbered()) return lane;
#ifdef MSL_MATRIX_LANES
  return numbered_lane(lane);
#else
  return (lane & 1u) | (lane >> 2 & 2u) | (lane << 1 & 4u) | (lane >> 1 & 8u) | (lane << 2 & 16u);
#endif
}

// Lanes whose number has bit `low` alone of two bits change places with those that have bit `high` alone.
template <uint32_t low, uint32_t high>
METAL_FUNC uint32_t exchanged_lanes(uint32_t lanes) {
  constexpr uint32_t every[] = {0xaaaaaaaau, 0xccccccccu, 0xf0f0f0f0u, 0xff00ff00u, 0xffff0000u};
  constexpr uint32_t distance = (1u << high) - (1u << low);
  const uint32_t changed = (lanes >> distance ^ lanes) & every[low] & ~every[high];
  return lanes ^ changed ^ changed << distance;
}
// The same lanes in the program's numbers.
METAL_FUNC uint32_t program_lanes(uint32_t hardware_lanes) {
  if (!is_renumbered()) return hardware_lanes;
#ifdef MSL_MATRIX_LANES
  return exchanged_lanes<1, 3>(hardware_lanes);
#else
  return exchanged_lanes<1, 2>(exchanged_lanes<1, 3>(exchanged_lanes<3, 4>(hardware_lanes)));
#endif
}

#else

METAL_FUNC uint32_t hardware_lane(uint32_t lane) { return lane; }
METAL_FUNC uint32_t program_lanes(uint32_t hardware_lanes) { return hardware_lanes; }

#endif

constexpr uint32_t kEveryLane = 0xffffffffu;

#ifdef MSL_CONVERGENT
constexpr bool kConvergent = true;
#else
constexpr bool kConvergent = false;
#endif

// CUDA's functions take the warp's numbers of lanes (`mask`), and all else here the program's.
METAL_FUNC uint32_t active_lanes() {
  if constexpr (kConvergent) return kEveryLane;
  return __activemask();
}

// The lanes of this lane's group, as a mask.
template <uint32_t Width>
METAL_FUNC uint32_t group_lanes() {
  if constexpr (Width == kSimd) return kEveryLane;
  return 0xfu << (index_of_lane() & ~(Width - 1));
}

// Calls f on each 32-bit word of a value and makes a value of the results.
template <class T, class F>
METAL_FUNC T map_words(const T& value, F f) {
  constexpr uint32_t count = (sizeof(T) + 3) / 4;
  uint32_t words[count] = {};
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (uint32_t i = 0; i < count; ++i) words[i] = f(words[i]);
  T result;
  memcpy(&result, words, sizeof(T));
  return result;
}

#ifdef MSL_NUMBERED_LANES
// The value of lane `source` of the group.
template <uint32_t Width, class T>
METAL_FUNC T shuffle(uint32_t mask, const T& value, uint32_t source) {
  uint32_t start = Width == kSimd ? 0 : index_of_lane() & ~(Width - 1);
  int lane = int(hardware_lane(start | (source & (Width - 1))));
  return map_words(value, [=](uint32_t word) { return __shfl_sync(mask, word, lane); });
}
template <uint32_t Width, class T>
METAL_FUNC T shuffle_flipped(uint32_t mask, const T& value, uint32_t n) {
  int flips = int(hardware_lane(n & (Width - 1)));
  return map_words(value, [=](uint32_t word) { return __shfl_xor_sync(mask, word, flips); });
}
template <uint32_t Width, class T>
METAL_FUNC T shuffle_lower(uint32_t mask, const T& value, uint32_t n) {
  uint32_t lane = index_of_lane() & (Width - 1);
  return shuffle<Width>(mask, value, lane < n ? lane : lane - n);
}
template <uint32_t Width, class T>
METAL_FUNC T shuffle_upper(uint32_t mask, const T& value, uint32_t n) {
  uint32_t lane = index_of_lane() & (Width - 1);
  return shuffle<Width>(mask, value, lane + n < Width ? lane + n : lane);
}
#else
template <uint32_t Width, class T>
METAL_FUNC T shuffle(uint32_t mask, const T& value, uint32_t source) {
  return map_words(value, [=](uint32_t word) { return __shfl_sync(mask, word, int(source), Width); });
}
template <uint32_t Width, class T>
METAL_FUNC T shuffle_flipped(uint32_t mask, const T& value, uint32_t n) {
  return map_words(value, [=](uint32_t word) { return __shfl_xor_sync(mask, word, int(n), Width); });
}
template <uint32_t Width, class T>
METAL_FUNC T shuffle_lower(uint32_t mask, const T& value, uint32_t n) {
  return map_words(value, [=](uint32_t word) { return __shfl_up_sync(mask, word, n, Width); });
}
template <uint32_t Width, class T>
METAL_FUNC T shuffle_upper(uint32_t mask, const T& value, uint32_t n) {
  return map_words(value, [=](uint32_t word) { return __shfl_down_sync(mask, word, n, Width); });
}
#endif

// The value of lane `source` of the simdgroup, or zeros: CUDA's result for a lane that is not in the mask is undefined.
template <class T>
METAL_FUNC T shuffle_if(bool there, uint32_t mask, const T& value, uint32_t source) {
  int lane = int(hardware_lane(source));
  return map_words(value, [=](uint32_t word) {
    uint32_t found = __shfl_sync(mask, word, lane);
    return there ? found : 0u;
  });
}

// Combines the values of all lanes of the group in the order of the CPU executor. All lanes must be in `mask`.
template <uint32_t Width, class Operation, class T>
METAL_FUNC T reduce_whole(uint32_t mask, T value) {
#pragma unroll
  for (uint32_t n = Width / 2; n; n /= 2) value = combine<Operation, T>(value, shuffle_flipped<Width>(mask, value, n));
  return value;
}

// 32-bit integers have an instruction for all lanes at once.
template <class Operation, class T>
constexpr bool has_reduce_instruction =
#if __CUDA_ARCH__ >= 800
    std::is_integral_v<T> && sizeof(T) == 4 && !std::is_same_v<Operation, Product>;
#else
    false;
#endif

template <class Operation, class T>
METAL_FUNC T reduce_by_instruction(uint32_t mask, T value) {
  if constexpr (std::is_same_v<Operation, Sum>) return T(__reduce_add_sync(mask, uint32_t(value)));
  else if constexpr (std::is_same_v<Operation, Min>) return __reduce_min_sync(mask, value);
  else if constexpr (std::is_same_v<Operation, Max>) return __reduce_max_sync(mask, value);
  else if constexpr (std::is_same_v<Operation, And>) return T(__reduce_and_sync(mask, uint32_t(value)));
  else if constexpr (std::is_same_v<Operation, Or>) return T(__reduce_or_sync(mask, uint32_t(value)));
  else return T(__reduce_xor_sync(mask, uint32_t(value)));
}

// Combines the values of all active lanes of the group.
template <uint32_t Width, class Operation, class T>
METAL_FUNC T reduce(const T& value, uint32_t) {
  uint32_t mask = active_lanes();
  if constexpr (Width == kSimd && has_reduce_instruction<Operation, T>) {
    return reduce_by_instruction<Operation>(mask, value);
  } else {
    if (mask == kEveryLane) return reduce_whole<Width, Operation>(mask, value);
    // Every lane walks over all active lanes, so that the lanes stay together, and takes the values of its group.
    uint32_t group = group_lanes<Width>();
    T result = value;
    bool first = true;
    for (uint32_t remaining = program_lanes(mask); remaining; remaining &= remaining - 1) {
      T other = shuffle<kSimd>(mask, value, __ffs(remaining) - 1);
      if (!(group & remaining & (0u - remaining))) continue;
      result = first ? other : combine<Operation, T>(result, other);
      first = false;
    }
    return result;
  }
}

// Combines the values of the active lanes up to (or before) this one, beginning with `identity`.
template <uint32_t Width, class Operation, class T>
METAL_FUNC T prefix(const T& value, const T& identity, bool inclusive, uint32_t) {
  uint32_t mask = active_lanes(), lane = index_of_lane() & (Width - 1);
  if (mask == kEveryLane) {
    T sum = value;
#pragma unroll
    for (uint32_t n = 1; n < Width; n *= 2) {
      T other = shuffle_lower<Width>(mask, sum, n);
      if (lane >= n) sum = combine<Operation, T>(other, sum);
    }
    if (inclusive) return sum;
    T before = shuffle_lower<Width>(mask, sum, 1);
    return lane ? before : identity;
  }
  uint32_t below = group_lanes<Width>() & ((1u << index_of_lane()) - 1);
  T result = identity;
  for (uint32_t remaining = program_lanes(mask); remaining; remaining &= remaining - 1) {
    T other = shuffle<kSimd>(mask, value, __ffs(remaining) - 1);
    if (below & remaining & (0u - remaining)) result = combine<Operation, T>(result, other);
  }
  return inclusive ? combine<Operation, T>(result, value) : result;
}

// The value of the lane that Source chooses, where all lanes are active.
template <uint32_t Width, class Source, class T>
METAL_FUNC T fetch_convergent(const T& value, uint32_t n) {
  if constexpr (std::is_same_v<Source, Lower>) return shuffle_lower<Width>(kEveryLane, value, n);
  else if constexpr (std::is_same_v<Source, Upper>) return shuffle_upper<Width>(kEveryLane, value, n);
  else if constexpr (std::is_same_v<Source, Flipped>) return shuffle_flipped<Width>(kEveryLane, value, n);
  else return shuffle<Width>(kEveryLane, value, Source::source_lane(index_of_lane(), n, Width));
}

// The value of the lane that Source chooses, or zeros where it is inactive. Where the group has no such lane, the
// result is this lane's own value if Source keeps that, and zeros otherwise.
template <uint32_t Width, class Source, class T>
METAL_FUNC T fetch(const T& value, uint32_t n, uint32_t) {
  if constexpr (kConvergent) {
    return fetch_convergent<Width, Source>(value, n);
  } else {
    uint32_t mask = active_lanes(), lane = index_of_lane() & (Width - 1), start = index_of_lane() - lane;
    uint32_t from = Source::source_lane(lane, n, Width);
    bool inside = from < Width;
    if (!inside && Source::keeps) from = lane;
    bool there = (inside || Source::keeps) && mask >> hardware_lane(start + from) & 1;
    return shuffle_if(there, mask, value, start + from);
  }
}

// The value of the first active lane.
template <uint32_t Width, class T>
METAL_FUNC T fetch_first(const T& value, uint32_t) {
  uint32_t mask = active_lanes();
  return shuffle<kSimd>(mask, value, __ffs(program_lanes(mask) & group_lanes<Width>()) - 1);
}

// The value of the lane `delta` lanes further in the block of `modulo` lanes, or its filling where the block ends
// before.
template <uint32_t Width, class T>
METAL_FUNC T fill(const T& value, const T& filling, int delta, uint32_t modulo, uint32_t) {
  uint32_t mask = active_lanes(), lane = index_of_lane();
  uint32_t block = lane & ~(modulo - 1);
  int from = int(lane - block) + delta;
  uint32_t source = block + (uint32_t(from) & (modulo - 1));
  bool there = mask >> hardware_lane(source) & 1;
  T inside = shuffle_if(there, mask, value, source), outside = shuffle_if(there, mask, filling, source);
  return from >= 0 && from < int(modulo) ? inside : outside;
}

// Bit i is set where active lane i of the group passed true.
template <uint32_t Width>
METAL_FUNC uint32_t ballot(bool value, uint32_t) {
  uint32_t lanes = program_lanes(__ballot_sync(active_lanes(), value));
  return Width == kSimd ? lanes : lanes >> (index_of_lane() & ~(Width - 1)) & 0xfu;
}

// Whether this is the first active lane of the group.
template <uint32_t Width>
METAL_FUNC bool is_first(uint32_t) {
  return int(index_of_lane()) == __ffs(program_lanes(active_lanes()) & group_lanes<Width>()) - 1;
}

}  // namespace msl

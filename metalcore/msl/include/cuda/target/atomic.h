// Atomic accesses by CUDA's functions. They are relaxed, have the device's scope, and work on device and threadgroup
// memory.
#pragma once

#include "metal/lane_operations.h"

namespace msl {

// The unsigned integer as which an atomic object is accessed.
template <class T>
using atomic_bits_t =
    std::conditional_t<sizeof(T) == 8, unsigned long long,
                       std::conditional_t<sizeof(T) == 4, uint32_t,
                                          std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>;

template <class Bits>
METAL_FUNC Bits atomic_load(const volatile Bits* address) {
  return *address;
}
template <class Bits>
METAL_FUNC void atomic_store(volatile Bits* address, Bits desired) {
  *address = desired;
}

// Leaves the value that it found in `expected`.
template <class Bits>
METAL_FUNC bool atomic_compare_exchange(volatile Bits* address, Bits& expected, Bits desired) {
  Bits found;
  if constexpr (sizeof(Bits) > 1) {
    found = atomicCAS(const_cast<Bits*>(address), expected, desired);
  } else {
    // A byte is exchanged as a part of the word around it.
    auto word = reinterpret_cast<uint32_t*>(reinterpret_cast<uintptr_t>(address) & ~uintptr_t(3));
    uint32_t shift = uint32_t(reinterpret_cast<uintptr_t>(address) & 3) * 8;
    uint32_t before = *const_cast<volatile uint32_t*>(word), assumed;
    do {
      found = Bits(before >> shift);
      if (found != expected) break;
      assumed = before;
      before = atomicCAS(word, assumed, (assumed & ~(0xffu << shift)) | uint32_t(desired) << shift);
    } while (before != assumed);
  }
  bool exchanged = found == expected;
  expected = found;
  return exchanged;
}

template <class Bits>
METAL_FUNC Bits atomic_exchange(volatile Bits* address, Bits desired) {
  if constexpr (sizeof(Bits) >= 4) {
    return atomicExch(const_cast<Bits*>(address), desired);
  } else {
    Bits found = *address;
    while (!atomic_compare_exchange(address, found, desired)) {
    }
    return found;
  }
}

template <class Operation, class T>
constexpr bool has_atomic_fetch =
    (std::is_integral_v<T> && sizeof(T) >= 4) ||
    (std::is_same_v<T, float> && (std::is_same_v<Operation, Sum> || std::is_same_v<Operation, Difference>));

template <class Operation, class T>
METAL_FUNC T atomic_fetch(T* object, T operand) {
  // A type that CUDA's functions accept: float, unsigned, or signed where the sign makes a difference.
  constexpr bool ordered = std::is_same_v<Operation, Min> || std::is_same_v<Operation, Max>;
  using Signed = std::conditional_t<sizeof(T) == 8, long long, int>;
  using Number = std::conditional_t<std::is_same_v<T, float>, float,
                                    std::conditional_t<ordered && std::is_signed_v<T>, Signed, atomic_bits_t<T>>>;
  auto address = reinterpret_cast<Number*>(object);
  auto number = Number(operand);
  if constexpr (std::is_same_v<Operation, Sum>) return T(atomicAdd(address, number));
  else if constexpr (std::is_same_v<Operation, Difference>) return T(atomicAdd(address, Number(0) - number));
  else if constexpr (std::is_same_v<Operation, Min>) return T(atomicMin(address, number));
  else if constexpr (std::is_same_v<Operation, Max>) return T(atomicMax(address, number));
  else if constexpr (std::is_same_v<Operation, And>) return T(atomicAnd(address, number));
  else if constexpr (std::is_same_v<Operation, Or>) return T(atomicOr(address, number));
  else return T(atomicXor(address, number));
}

// Threads of a warp run independently of each other.
METAL_FUNC void yield() {}

}  // namespace msl

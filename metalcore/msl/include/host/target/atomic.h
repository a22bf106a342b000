// Atomic accesses by the compiler's builtins.
#pragma once

#include "metal/lane_operations.h"

namespace msl {

// The unsigned integer as which an atomic object is accessed.
template <class T>
using atomic_bits_t =
    std::conditional_t<sizeof(T) == 8, uint64_t,
                       std::conditional_t<sizeof(T) == 4, uint32_t,
                                          std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>;

template <class Bits>
METAL_FUNC Bits atomic_load(const volatile Bits* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
template <class Bits>
METAL_FUNC void atomic_store(volatile Bits* address, Bits desired) {
  __atomic_store_n(address, desired, __ATOMIC_RELEASE);
}
template <class Bits>
METAL_FUNC Bits atomic_exchange(volatile Bits* address, Bits desired) {
  return __atomic_exchange_n(address, desired, __ATOMIC_ACQ_REL);
}
// Leaves the value that it found in `expected`.
template <class Bits>
METAL_FUNC bool atomic_compare_exchange(volatile Bits* address, Bits& expected, Bits desired) {
  return __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

template <class Operation, class T>
constexpr bool has_atomic_fetch = std::is_integral_v<T> && !std::is_same_v<T, bool> &&
                                  !std::is_same_v<Operation, Min> && !std::is_same_v<Operation, Max>;

// Signed and unsigned integers wrap around in the same way, so the unsigned builtin serves both.
template <class Operation, class T>
METAL_FUNC T atomic_fetch(T* object, T operand) {
  auto address = reinterpret_cast<volatile atomic_bits_t<T>*>(object);
  auto bits = atomic_bits_t<T>(operand);
  if constexpr (std::is_same_v<Operation, Sum>)
    return T(__atomic_fetch_add(address, bits, __ATOMIC_ACQ_REL));
  else if constexpr (std::is_same_v<Operation, Difference>)
    return T(__atomic_fetch_sub(address, bits, __ATOMIC_ACQ_REL));
  else if constexpr (std::is_same_v<Operation, And>)
    return T(__atomic_fetch_and(address, bits, __ATOMIC_ACQ_REL));
  else if constexpr (std::is_same_v<Operation, Or>)
    return T(__atomic_fetch_or(address, bits, __ATOMIC_ACQ_REL));
  else
    return T(__atomic_fetch_xor(address, bits, __ATOMIC_ACQ_REL));
}

// Lets the other threads of the threadgroup run.
METAL_FUNC void yield() { runtime->yield(); }

}  // namespace msl

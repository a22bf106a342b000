// Atomic types and functions on device and threadgroup memory. An operation without an instruction in target/atomic.h
// is a loop of compare-and-exchange. The memory orders are at least as strong as the program's.
#pragma once

#include "metal/lane_operations.h"
#include "metal/synchronize.h"
#include "target/atomic.h"

namespace metal {

template <class T>
struct atomic {
  using value_type = T;
  T value;
};

}  // namespace metal

#define MSL_ATOMIC_NAME(T)             \
  using atomic_##T = metal::atomic<T>; \
  namespace metal {                    \
  using MSL_ROOT::atomic_##T;          \
  }
MSL_ATOMIC_NAME(int)
MSL_ATOMIC_NAME(uint)
MSL_ATOMIC_NAME(bool)
MSL_ATOMIC_NAME(float)
MSL_ATOMIC_NAME(ulong)
#undef MSL_ATOMIC_NAME

namespace msl {

// The type of a value argument: it is converted to the atomic's type, not deduced.
template <class T>
using operand = typename metal::atomic<T>::value_type;

template <class T>
METAL_FUNC auto atomic_address(const volatile metal::atomic<T>* object) {
  return reinterpret_cast<volatile atomic_bits_t<T>*>(const_cast<volatile metal::atomic<T>*>(object));
}

// Replaces the value by Operation()(value, operand), and returns the value before.
template <class Operation, class T>
METAL_FUNC T atomic_fetch(volatile metal::atomic<T>* object, T operand) {
  if constexpr (has_atomic_fetch<Operation, T>) {
    return atomic_fetch<Operation>(const_cast<T*>(&object->value), operand);
  } else {
    auto address = atomic_address(object);
    auto bits = atomic_load(address);
    while (!atomic_compare_exchange(address, bits,
                                    bit_cast<atomic_bits_t<T>>(T(Operation()(bit_cast<T>(bits), operand))))) {
    }
    return bit_cast<T>(bits);
  }
}

// T where Metal has the operation: 64-bit atomics have no result, and floats are added and subtracted only.
template <class Operation, class T>
using fetched = std::enable_if_t<sizeof(T) <= 4 && (!std::is_floating_point_v<T> || std::is_same_v<Operation, Sum> ||
                                                    std::is_same_v<Operation, Difference>),
                                 T>;

}  // namespace msl

namespace metal {

template <class T>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* object, msl::operand<T> desired, memory_order) {
  msl::atomic_store(msl::atomic_address(object), msl::bit_cast<msl::atomic_bits_t<T>>(desired));
}

template <class T>
METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  T value = msl::bit_cast<T>(msl::atomic_load(msl::atomic_address(object)));
  msl::yield();  // the caller may wait for another thread's store
  return value;
}

template <class T>
METAL_FUNC T atomic_exchange_explicit(volatile atomic<T>* object, msl::operand<T> desired, memory_order) {
  return msl::bit_cast<T>(
      msl::atomic_exchange(msl::atomic_address(object), msl::bit_cast<msl::atomic_bits_t<T>>(desired)));
}

template <class T>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, msl::operand<T>* expected,
                                                      msl::operand<T> desired, memory_order, memory_order) {
  auto bits = msl::bit_cast<msl::atomic_bits_t<T>>(*expected);
  bool exchanged = msl::atomic_compare_exchange(msl::atomic_address(object), bits,
                                           msl::bit_cast<msl::atomic_bits_t<T>>(desired));
  *expected = msl::bit_cast<T>(bits);
  if (!exchanged) msl::yield();
  return exchanged;
}

#define MSL_FETCH(name, Operation)                                                                               \
  template <class T>                                                                                             \
  METAL_FUNC msl::fetched<msl::Operation, T> atomic_fetch_##name##_explicit(volatile atomic<T>* object,          \
                                                                            msl::operand<T> operand, memory_order) { \
    return msl::atomic_fetch<msl::Operation, T>(object, operand);                                                \
  }
MSL_FETCH(add, Sum)
MSL_FETCH(sub, Difference)
MSL_FETCH(and, And)
MSL_FETCH(or, Or)
MSL_FETCH(xor, Xor)
MSL_FETCH(min, Min)
MSL_FETCH(max, Max)
#undef MSL_FETCH

// The forms without a result, which only atomic_ulong has.
template <class T>
METAL_FUNC void atomic_min_explicit(volatile atomic<T>* object, msl::operand<T> operand, memory_order) {
  msl::atomic_fetch<msl::Min, T>(object, operand);
}
template <class T>
METAL_FUNC void atomic_max_explicit(volatile atomic<T>* object, msl::operand<T> operand, memory_order) {
  msl::atomic_fetch<msl::Max, T>(object, operand);
}

}  // namespace metal

// Atomic types and functions on device and threadgroup memory. Integers use the compiler's builtins, float and the
// operations the machine lacks a compare-and-exchange loop. Orders are at least as strong as asked for.
#pragma once

#include "metal/synchronize.h"

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
  using ::atomic_##T;                  \
  }
MSL_ATOMIC_NAME(int)
MSL_ATOMIC_NAME(uint)
MSL_ATOMIC_NAME(bool)
MSL_ATOMIC_NAME(float)
MSL_ATOMIC_NAME(ulong)
#undef MSL_ATOMIC_NAME

namespace msl {

// The unsigned integer an atomic object is accessed as.
template <class T>
using atomic_bits_t =
    std::conditional_t<sizeof(T) == 8, uint64_t,
                       std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>;

template <class T>
METAL_FUNC auto atomic_address(const volatile metal::atomic<T>* object) {
  return reinterpret_cast<volatile atomic_bits_t<T>*>(const_cast<volatile metal::atomic<T>*>(object));
}

// A value argument, converted to the atomic's type rather than deduced.
template <class T>
using operand = typename metal::atomic<T>::value_type;

// Replaces the value by f(value); returns the value before.
template <class T, class F>
METAL_FUNC T atomic_update(volatile metal::atomic<T>* object, F f) {
  auto address = atomic_address(object);
  atomic_bits_t<T> bits = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &bits, bit_cast<atomic_bits_t<T>>(T(f(bit_cast<T>(bits)))), true,
                                      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return bit_cast<T>(bits);
}

}  // namespace msl

namespace metal {

template <class T>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* object, msl::operand<T> desired, memory_order) {
  __atomic_store_n(msl::atomic_address(object), msl::bit_cast<msl::atomic_bits_t<T>>(desired), __ATOMIC_RELEASE);
}

template <class T>
METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  T value = msl::bit_cast<T>(__atomic_load_n(msl::atomic_address(object), __ATOMIC_ACQUIRE));
  msl::runtime->yield();  // the caller may be waiting for another thread's store
  return value;
}

template <class T>
METAL_FUNC T atomic_exchange_explicit(volatile atomic<T>* object, msl::operand<T> desired, memory_order) {
  return msl::bit_cast<T>(
      __atomic_exchange_n(msl::atomic_address(object), msl::bit_cast<msl::atomic_bits_t<T>>(desired), __ATOMIC_ACQ_REL));
}

template <class T>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, msl::operand<T>* expected,
                                                      msl::operand<T> desired, memory_order, memory_order) {
  auto bits = msl::bit_cast<msl::atomic_bits_t<T>>(*expected);
  bool done = __atomic_compare_exchange_n(msl::atomic_address(object), &bits,
                                          msl::bit_cast<msl::atomic_bits_t<T>>(desired), false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE);
  *expected = msl::bit_cast<T>(bits);
  if (!done) msl::runtime->yield();
  return done;
}

// Integers wrap around alike whether signed or not, so the unsigned builtin serves both.
#define MSL_FETCH(name, op)                                                                                         \
  template <class T>                                                                                                \
  METAL_FUNC T atomic_fetch_##name##_explicit(volatile atomic<T>* object, msl::operand<T> operand, memory_order) {  \
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)                                                \
      return T(__atomic_fetch_##name(msl::atomic_address(object), msl::atomic_bits_t<T>(operand),                   \
                                     __ATOMIC_ACQ_REL));                                                            \
    else                                                                                                            \
      return msl::atomic_update(object, [=](T value) { return value op operand; });                                 \
  }
MSL_FETCH(add, +)
MSL_FETCH(sub, -)
MSL_FETCH(and, &)
MSL_FETCH(or, |)
MSL_FETCH(xor, ^)
#undef MSL_FETCH

template <class T>
METAL_FUNC T atomic_fetch_min_explicit(volatile atomic<T>* object, msl::operand<T> operand, memory_order) {
  return msl::atomic_update(object, [=](T value) { return operand < value ? operand : value; });
}
template <class T>
METAL_FUNC T atomic_fetch_max_explicit(volatile atomic<T>* object, msl::operand<T> operand, memory_order) {
  return msl::atomic_update(object, [=](T value) { return value < operand ? operand : value; });
}

// The forms without a result, which atomic_ulong has.
template <class T>
METAL_FUNC void atomic_min_explicit(volatile atomic<T>* object, msl::operand<T> operand, memory_order order) {
  atomic_fetch_min_explicit(object, operand, order);
}
template <class T>
METAL_FUNC void atomic_max_explicit(volatile atomic<T>* object, msl::operand<T> operand, memory_order order) {
  atomic_fetch_max_explicit(object, operand, order);
}

}  // namespace metal

// Atomics and barriers. An atomic object is in device or threadgroup memory; flags of a barrier are constants.
#pragma once

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }

enum memory_order { memory_order_relaxed, memory_order_acquire = 2, memory_order_release, memory_order_acq_rel,
                    memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_threadgroup, thread_scope_device, thread_scope_simdgroup };
// Functions newer than Metal 3.1. A using-directive finds them, so a program may still declare them itself, as MLX
// does.
namespace newer {
constexpr constant thread_scope thread_scope_system = thread_scope(4);
}
using namespace newer;

#define MSL_CONSTANT_FLAGS __attribute__((enable_if(uint(flags) < 32, "the flags of a barrier must be a constant")))
void threadgroup_barrier(mem_flags flags) MSL_CONSTANT_FLAGS;
void threadgroup_barrier(mem_flags flags, thread_scope) MSL_CONSTANT_FLAGS;
void simdgroup_barrier(mem_flags flags) MSL_CONSTANT_FLAGS;
void simdgroup_barrier(mem_flags flags, thread_scope) MSL_CONSTANT_FLAGS;
void atomic_thread_fence(mem_flags flags, memory_order, thread_scope = thread_scope_device) MSL_CONSTANT_FLAGS;
#undef MSL_CONSTANT_FLAGS

template <class T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, bool> || is_same_v<T, float> ||
                    is_same_v<T, long> || is_same_v<T, ulong>,
                "atomic<T> needs int, uint, bool, float or ulong");
  T value;
};

}  // namespace metal

namespace msl {
template <class T>
struct itself {
  using type = T;
};
template <class T>
using operand = typename itself<T>::type;
// 64-bit atomics have no result.
template <class T>
using fetched = metal::enable_if_t<(sizeof(T) <= 4), T>;
// Floats are added and subtracted only.
template <class T>
using fetched_integer = metal::enable_if_t<(sizeof(T) <= 4) && !metal::is_same_v<T, float>, T>;
}  // namespace msl

#define MSL_ATOMIC_NAME(T)             \
  using atomic_##T = metal::atomic<T>; \
  namespace metal {                    \
  using ::atomic_##T;                  \
  }
MSL_ATOMIC_NAME(int) MSL_ATOMIC_NAME(uint) MSL_ATOMIC_NAME(bool) MSL_ATOMIC_NAME(float) MSL_ATOMIC_NAME(ulong)
#undef MSL_ATOMIC_NAME

namespace metal {

#define MSL_FETCH(space, name, fetched) \
  template <class T>                    \
  msl::fetched<T> atomic_fetch_##name##_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order);
#define MSL_ATOMICS(space)                                                                                            \
  template <class T>                                                                                                  \
  void atomic_store_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order);                               \
  template <class T>                                                                                                  \
  msl::fetched<T> atomic_load_explicit(const volatile space atomic<T>*, memory_order);                                \
  template <class T>                                                                                                  \
  msl::fetched<T> atomic_exchange_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order);                 \
  template <class T>                                                                                                  \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, __private msl::operand<T>*, msl::operand<T>,  \
                                             memory_order, memory_order);                                             \
  MSL_FETCH(space, add, fetched) MSL_FETCH(space, sub, fetched) MSL_FETCH(space, and, fetched_integer)                \
  MSL_FETCH(space, or, fetched_integer) MSL_FETCH(space, xor, fetched_integer)                                        \
  MSL_FETCH(space, min, fetched_integer) MSL_FETCH(space, max, fetched_integer)                                       \
  template <class T>                                                                                                  \
  void atomic_min_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order);                                 \
  template <class T>                                                                                                  \
  void atomic_max_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order);
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
#undef MSL_ATOMICS
#undef MSL_FETCH

}  // namespace metal

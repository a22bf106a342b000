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

enum memory_order : int {
  memory_order_relaxed,
  memory_order_acquire = 2,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope : int { thread_scope_thread, thread_scope_threadgroup, thread_scope_device, thread_scope_simdgroup };
// Functions newer than Metal 3.1. A using-directive finds them, so a program may still declare them itself, as MLX
// does.
namespace newer {
constexpr constant thread_scope thread_scope_system = thread_scope(4);
}
using namespace newer;

#define MSL_CONSTANT_FLAGS __attribute__((enable_if(uint(flags) < 32, "the flags of a barrier must be a constant")))
void threadgroup_barrier(mem_flags flags) MSL_CONSTANT_FLAGS;
void threadgroup_barrier(mem_flags flags, thread_scope) MSL_CONSTANT_FLAGS MSL_SINCE_3_2;
void simdgroup_barrier(mem_flags flags) MSL_CONSTANT_FLAGS;
void simdgroup_barrier(mem_flags flags, thread_scope) MSL_CONSTANT_FLAGS MSL_SINCE_3_2;
void atomic_thread_fence(mem_flags flags, memory_order, thread_scope = thread_scope_device) MSL_CONSTANT_FLAGS
    MSL_SINCE_3_2;
#undef MSL_CONSTANT_FLAGS

template <class T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, bool> || is_same_v<T, float> ||
                    is_same_v<T, long> || is_same_v<T, ulong>,
                "atomic<T> needs int, uint, bool, float or ulong");
  atomic() = default;
  atomic(const atomic&) = delete;
  atomic& operator=(const atomic&) = delete;
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
// Floats are added and subtracted only, and a bool is only read, written and exchanged.
template <class T>
using fetched_number = metal::enable_if_t<(sizeof(T) <= 4) && !metal::is_same_v<T, bool>, T>;
template <class T>
using fetched_integer =
    metal::enable_if_t<(sizeof(T) <= 4) && metal::is_integral_v<T> && !metal::is_same_v<T, bool>, T>;
// 64-bit integers have a minimum and a maximum only.
template <class T>
using extreme = metal::enable_if_t<metal::is_same_v<T, ulong>>;
// Threadgroup memory has no atomic floats, and no atomics of 64 bits.
template <class T>
using of_threadgroup = metal::enable_if_t<(sizeof(T) <= 4) && metal::is_integral_v<T>>;
template <class T>
using of_device = void;
}  // namespace msl

#define MSL_ATOMIC_NAME(T)             \
  using atomic_##T = metal::atomic<T>; \
  namespace metal {                    \
  using ::atomic_##T;                  \
  }
MSL_ATOMIC_NAME(int)
MSL_ATOMIC_NAME(uint)
MSL_ATOMIC_NAME(bool) MSL_ATOMIC_NAME(float) MSL_ATOMIC_NAME(ulong)
#undef MSL_ATOMIC_NAME

    namespace metal {

#define MSL_RELAXED(order) \
  __attribute__((enable_if(order == memory_order_relaxed, "the order of an atomic must be memory_order_relaxed")))
#define MSL_FETCH(space, where, name, fetched)                                                                   \
  template <class T, class = msl::where<T>>                                                                      \
  msl::fetched<T> atomic_fetch_##name##_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order order) \
      MSL_RELAXED(order);
#define MSL_ATOMICS(space, where)                                                                                    \
  template <class T, class = msl::where<T>>                                                                          \
  void atomic_store_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order order) MSL_RELAXED(order);     \
  template <class T, class = msl::where<T>>                                                                          \
  msl::fetched<T> atomic_load_explicit(const volatile space atomic<T>*, memory_order order) MSL_RELAXED(order);      \
  template <class T, class = msl::where<T>>                                                                          \
  msl::fetched<T> atomic_exchange_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order order)           \
      MSL_RELAXED(order);                                                                                            \
  template <class T, class = msl::where<T>>                                                                          \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, __private msl::operand<T>*, msl::operand<T>, \
                                             memory_order order, memory_order failed) MSL_RELAXED(order)             \
      MSL_RELAXED(failed);                                                                                           \
  MSL_FETCH(space, where, add, fetched_number)                                                                       \
  MSL_FETCH(space, where, sub, fetched_number)                                                                       \
  MSL_FETCH(space, where, and, fetched_integer) MSL_FETCH(space, where, or, fetched_integer)                         \
      MSL_FETCH(space, where, xor, fetched_integer) MSL_FETCH(space, where, min, fetched_integer) MSL_FETCH(         \
          space, where, max, fetched_integer) template <class T, class = msl::where<T>, class = msl::extreme<T>>     \
      void atomic_min_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order order) MSL_RELAXED(order);   \
  template <class T, class = msl::where<T>, class = msl::extreme<T>>                                                 \
  void atomic_max_explicit(volatile space atomic<T>*, msl::operand<T>, memory_order order) MSL_RELAXED(order);
  MSL_ATOMICS(device, of_device)
#ifdef __OPENCL_CPP_VERSION__
  MSL_ATOMICS(threadgroup, of_threadgroup)
#endif
#undef MSL_ATOMICS
#undef MSL_FETCH
#undef MSL_RELAXED

}  // namespace metal

// The services that a translated kernel needs from the executor: the running thread, threadgroup memory, barriers.
// `line` is the line of the call in the user's source (see kernel_abi.h).
#pragma once

#include "host/kernel_abi.h"

// `#pragma unroll` serves GPUs' registers. The CPU's compiler decides by itself.
#define MSL_UNROLL
#define MSL_UNROLL_BY(count)

// Every function of these headers is inlined into the kernel, so that debug information puts a memory access on the
// user's line and loops over threads can be vectorized.
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_LAMBDA __attribute__((always_inline))
#define METAL_MATH METAL_FUNC  // for functions that are constexpr on targets that need them in constants
#define METAL_CONST __attribute__((const))
#define METAL_PURE __attribute__((pure))
#define METAL_NOINLINE __attribute__((noinline))

// The translator declares constants that have an initial value so.
#define MSL_CONSTANT const
#define MSL_MEMBER_CONSTANT inline const

// Checks an index of a vector, a matrix or a metal::array.
#if MSL_CHECKING
#define MSL_CHECK_INDEX(index, count) msl::callbacks::check_index(size_t(index), count)
#else
#define MSL_CHECK_INDEX(index, count) ((void)0)
#endif

// The program's outermost scope: MSL_ROOT::name.
#define MSL_ROOT

namespace msl {

// The type of a parameter for a vector that a function only reads.
template <class T>
using in = const T&;

using msl_abi::Uint3;
constexpr uint32_t kSimdWidth = msl_abi::kSimdWidth;

static const msl_abi::Runtime* runtime = nullptr;

METAL_FUNC const msl_abi::Thread& self() { return *runtime->self(); }
METAL_FUNC uint32_t index_of_lane() { return self().lane; }

// A threadgroup variable of the running kernel. `site` is the number that the translator gives the declaration, and
// `alignment` is the declaration's.
template <class T, uint32_t site, uint32_t alignment = 1>
METAL_FUNC T& threadgroup_variable() {
  constexpr uint32_t needed = alignment < alignof(T) ? alignof(T) : alignment;
  return *static_cast<T*>(runtime->threadgroup_memory(site, sizeof(T), needed));
}

// The place of an object, for functions that differ in address spaces only.
using msl_abi::Space;
METAL_FUNC Space space_of(const volatile void* address) { return runtime->space(const_cast<const void*>(address)); }
// A call of such a function with a null pointer faults at its line.
[[noreturn]] METAL_FUNC void fault() {
  *static_cast<volatile char*>(nullptr) = 0;
  __builtin_unreachable();
}

METAL_FUNC void threadgroup_barrier(uint32_t flags, uint32_t line) { runtime->threadgroup_barrier(flags, line); }
METAL_FUNC void simdgroup_barrier(uint32_t flags, uint32_t line) { runtime->simdgroup_barrier(flags, line); }
METAL_FUNC void memory_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Gives a threadgroup variable its initial value. One thread writes it, and the others wait.
template <class T>
struct initial {
  T value;
};
template <class T>
METAL_FUNC void initialize_threadgroup(T& variable, const initial<T>& value, uint32_t line = __builtin_LINE()) {
  if (self().index_in_threadgroup == 0) __builtin_memcpy((void*)&variable, &value.value, sizeof(T));
  threadgroup_barrier(2, line);
}

}  // namespace msl

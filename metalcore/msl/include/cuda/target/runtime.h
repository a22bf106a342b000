// What metal/ asks of the target, on CUDA: a simdgroup is a warp, threadgroup memory is shared memory. Where calls are
// in the user's source (`line`) matters to the CPU executor only.
#pragma once

#include "target/standard.h"

#define METAL_FUNC __device__ __forceinline__
#define MSL_CHECK_INDEX(index, count) ((void)0)
#define METAL_LAMBDA
#define METAL_MATH METAL_FUNC constexpr
#define METAL_CONST
#define METAL_PURE
#define METAL_NOINLINE __noinline__

// `#pragma unroll` in front of a loop.
#define MSL_PRAGMA(text) _Pragma(#text)
#define MSL_UNROLL MSL_PRAGMA(unroll)
#define MSL_UNROLL_BY(count) MSL_PRAGMA(unroll count)

// Of the C++ that Metal's compiler accepts, NVRTC lacks this word.
#define __extension__

// How the translator declares constants that have an initial value: CUDA runs nothing when it loads a program.
#define MSL_CONSTANT constexpr
#define MSL_MEMBER_CONSTANT constexpr

// Where names of the program's outermost scope are: MSL_ROOT::name.
#define MSL_ROOT ::metal_program

namespace msl {

// How functions take a vector that they only read: by value, so that one in memory is loaded as a whole. Through a
// reference each element is read by itself, and where it is a half or bfloat, a class, the compiler no longer knows
// that it is part of something aligned.
template <class T>
using in = T;

struct Uint3 {
  uint32_t x, y, z;
};

constexpr uint32_t kSimdWidth = 32;

// The linear index of a thread: x counts fastest, in blocks as in threadgroups.
METAL_FUNC uint32_t index_in_block() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

METAL_FUNC uint32_t index_of_lane() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A threadgroup variable of the running kernel; `site` numbers the declaration (given by the translator), and
// `alignment` is what the declaration asks for. Its bytes are declared rather than T itself, which may have a
// constructor.
template <class T, uint32_t site, uint32_t alignment = 16>
METAL_FUNC T& threadgroup_variable() {
  constexpr uint32_t least = alignment < 16 ? 16 : alignment;
  __shared__ alignas(least) alignas(T) unsigned char bytes[sizeof(T)];
  return (T&)bytes;  // T may be volatile
}

// Where an object lies, for functions that differ in address spaces only: buffers and constants, threadgroup memory, a
// thread's own variables, or nowhere (null).
enum class Space : uint32_t { memory, threadgroup, thread, none };
METAL_FUNC Space space_of(const volatile void* address) {
  const void* at = const_cast<const void*>(address);
  return !at ? Space::none : __isShared(at) ? Space::threadgroup : __isLocal(at) ? Space::thread : Space::memory;
}
// What a call of such a function with a null pointer comes to.
METAL_FUNC void fault() { __trap(); }

METAL_FUNC void threadgroup_barrier(uint32_t, uint32_t) { __syncthreads(); }
// Every thread of the simdgroup comes here, so lanes that diverged meet again.
METAL_FUNC void simdgroup_barrier(uint32_t, uint32_t) { __syncwarp(); }
METAL_FUNC void memory_fence() { __threadfence(); }

// Gives a threadgroup variable its initial value: one thread writes it, and the others wait.
template <class T>
struct initial {
  T value;
};
template <class T>
METAL_FUNC void initialize_threadgroup(T& variable, const initial<T>& value) {
  if (index_in_block() == 0) memcpy((void*)&variable, &value.value, sizeof(T));
  __syncthreads();
}

}  // namespace msl

// The services that metal/ needs from its target, on CUDA: a simdgroup is a warp, threadgroup memory is shared memory.
// Only the CPU executor uses `line`, the line of a call in the user's source.
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

// Metal's compiler accepts this word, and NVRTC does not know it.
#define __extension__

// The translator declares constants that have an initial value so, since CUDA runs no code when it loads a program.
#define MSL_CONSTANT constexpr
#define MSL_MEMBER_CONSTANT constexpr

// The program's outermost scope: MSL_ROOT::name.
#define MSL_ROOT ::metal_program

namespace msl {

// Functions take a vector that they only read by value, so that a vector in memory is loaded as a whole. Through a
// reference each element is read by itself: a half or a bfloat is a class, and the compiler no longer knows that it is
// part of an aligned vector.
template <class T>
using in = T;

struct Uint3 {
  uint32_t x, y, z;
};

constexpr uint32_t kSimdWidth = 32;

// The linear index of a thread in its block: x counts fastest.
METAL_FUNC uint32_t index_in_block() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

METAL_FUNC uint32_t warp_lane() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

#if defined(MSL_MATRIX_LANES) || defined(MSL_FRAGMENT_LANES)  // see lanes.h
#define MSL_NUMBERED_LANES
METAL_FUNC bool is_in_whole_warp() { return (index_in_block() | 31u) < blockDim.x * blockDim.y * blockDim.z; }
// The program's lane that is a lane of the warp.
METAL_FUNC uint32_t numbered_lane(uint32_t lane) {
#ifdef MSL_MATRIX_LANES
  return (lane & 0x15u) | (lane >> 2 & 2u) | (lane << 2 & 8u);
#else
  return (lane & 1u) | (lane >> 1 & 2u) | (lane >> 2 & 4u) | (lane << 2 & 8u) | (lane << 1 & 16u);
#endif
}

// The index of a thread in the program's order, and that of its lane.
METAL_FUNC uint32_t index_of_thread() {
  uint32_t index = index_in_block();
  return is_in_whole_warp() ? (index & ~31u) | numbered_lane(index & 31u) : index;
}
#ifdef MSL_FRAGMENT_LANES
// By numbers and no branch, behind which a loop's loads would be apart.
METAL_FUNC uint32_t index_of_lane() {
  const uint32_t lane = warp_lane();
  return lane ^ ((lane ^ numbered_lane(lane)) & (0u - uint32_t(is_in_whole_warp())));
}
#else
METAL_FUNC uint32_t index_of_lane() { return is_in_whole_warp() ? numbered_lane(warp_lane()) : warp_lane(); }
#endif
#else
METAL_FUNC uint32_t index_of_thread() { return index_in_block(); }
METAL_FUNC uint32_t index_of_lane() { return warp_lane(); }
#endif

// A threadgroup variable of the running kernel. `site` is the number that the translator gives the declaration, and
// `alignment` is the declaration's. The variable is declared as bytes, since T may have a constructor.
template <class T, uint32_t site, uint32_t alignment = 16>
METAL_FUNC T& threadgroup_variable() {
  constexpr uint32_t least = alignment < 16 ? 16 : alignment;
  __shared__ alignas(least) alignas(T) unsigned char bytes[sizeof(T)];
  return (T&)bytes;  // T may be volatile
}

// The place of an object, for functions that differ in address spaces only: buffers and constants, threadgroup memory,
// a thread's own variables, or nowhere (null).
enum class Space : uint32_t { memory, threadgroup, thread, none };
METAL_FUNC Space space_of(const volatile void* address) {
  const void* at = const_cast<const void*>(address);
  return !at ? Space::none : __isShared(at) ? Space::threadgroup : __isLocal(at) ? Space::thread : Space::memory;
}
// A call of such a function with a null pointer ends here.
METAL_FUNC void fault() { __trap(); }

METAL_FUNC void threadgroup_barrier(uint32_t, uint32_t) { __syncthreads(); }
// Every lane of the simdgroup calls it, so lanes that diverged meet again.
#ifdef MSL_MATRIX_LANES
// Around products of matrices, programs order the compiler's work by barriers without a flag, which order no memory.
// Lanes meet at the products.
METAL_FUNC void simdgroup_barrier(uint32_t flags, uint32_t) {
  if (flags) __syncwarp();
}
#else
METAL_FUNC void simdgroup_barrier(uint32_t, uint32_t) { __syncwarp(); }
#endif
METAL_FUNC void memory_fence() { __threadfence(); }

// Gives a threadgroup variable its initial value. One thread writes it, and the others wait.
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

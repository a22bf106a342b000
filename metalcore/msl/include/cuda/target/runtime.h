// What metal/ asks of the target, on CUDA: a simdgroup is a warp, threadgroup memory is shared memory. Where calls are
// in the user's source (`line`) matters to the CPU executor only.
#pragma once

#include "target/standard.h"

#define METAL_FUNC __device__ __forceinline__
#define MSL_CHECK_INDEX(index, count) ((void)0)
#define METAL_LAMBDA
#define METAL_CONST
#define METAL_PURE
#define METAL_NOINLINE __noinline__

// `#pragma unroll` in front of a loop.
#define MSL_PRAGMA(text) _Pragma(#text)
#define MSL_UNROLL MSL_PRAGMA(unroll)
#define MSL_UNROLL_BY(count) MSL_PRAGMA(unroll count)

// Of the C++ that Metal's compiler accepts, NVRTC lacks this word.
#define __extension__

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

// A threadgroup variable of the running kernel; `site` numbers the declaration (given by the translator). Its bytes are
// declared rather than T itself, which may have a constructor.
template <class T, uint32_t site>
METAL_FUNC T& threadgroup_variable() {
  __shared__ alignas(alignof(T) < 16 ? 16 : alignof(T)) unsigned char bytes[sizeof(T)];
  return reinterpret_cast<T&>(bytes);
}

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
  if (index_in_block() == 0) memcpy(&variable, &value.value, sizeof(T));
  __syncthreads();
}

}  // namespace msl

// Copies of tiles to threadgroup memory that go on while a threadgroup multiplies, and tiles of more than 48 KiB. A
// kernel writes them in plain MSL (kernels/common/copies.h), as functions whose last parameter is a `long`. The
// functions here have an `int` there, so that a call with 0 comes here. cuda_source.py includes this header for programs
// that call them.
//
//   metalcore_copy_pack(to, from, 0)            begins to copy 16 bytes, from and to multiples of 16 bytes
//   metalcore_prefetch(from, 0)                 brings the memory around an element to the second-level cache
//   metalcore_await_copies(0)                   waits for the copies that this thread has begun
//   metalcore_memory_of_tile<bytes>(tile, 0)    memory of so many bytes, instead of the kernel's own tile
#pragma once

#if __CUDA_ARCH__ >= 800

namespace msl {

// A kernel that has this variable is launched with so many KiB of dynamic shared memory (csrc/backends/cuda/kernels.cpp
// finds the name in its code).
template <int kib>
__device__ unsigned char metalcore_pipeline_kib;

}  // namespace msl

template <class T>
METAL_FUNC void metalcore_copy_pack(T* to, const T* from, int) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
template <class T>
METAL_FUNC void metalcore_prefetch(const T* from, int) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
METAL_FUNC void metalcore_await_copies(int) { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <uint32_t bytes, class T>
METAL_FUNC T* metalcore_memory_of_tile(T*, int) {
  asm volatile("" ::"l"(&msl::metalcore_pipeline_kib<(bytes + 1023) / 1024>));
  extern __shared__ uint4 dynamic_threadgroup_memory[];
  return reinterpret_cast<T*>(dynamic_threadgroup_memory);
}

#endif

// How a kernel is called on CUDA: Caller makes the arguments from one parameter block and the thread's index, and calls
// the kernel.
#pragma once

#include "metal/positions.h"

#define MSL_KERNEL __device__ __forceinline__

namespace msl {

// Every parameter block begins with it.
struct Grid {
  uint32_t threads_per_grid[3];
  uint32_t threads_per_threadgroup[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t first_threadgroup[3];  // CUDA limits a grid's y and z, so a large one is launched in parts
};

// Bytes in the block, which are bound like a buffer.
template <uint32_t capacity>
struct alignas(16) Bytes {
  unsigned char bytes[capacity];
};

// The place of this thread. A threadgroup may have another shape than its CUDA block: it may be smaller at the grid's
// edge, and a block has limits that a threadgroup does not have. Then the threads of the block are numbered in one row,
// so that lanes and simdgroups are those of the threadgroup, and the rest of the block is surplus.
struct Place {
  Uint3 threadgroup, size, position;
  uint32_t index;

  // Gives false for a surplus thread.
  METAL_FUNC bool find(const Grid& grid) {
    threadgroup = {blockIdx.x + grid.first_threadgroup[0], blockIdx.y + grid.first_threadgroup[1],
                   blockIdx.z + grid.first_threadgroup[2]};
    size = {extent(grid, 0, threadgroup.x), extent(grid, 1, threadgroup.y), extent(grid, 2, threadgroup.z)};
    index = index_of_thread();
    position = {threadIdx.x, threadIdx.y, threadIdx.z};
#ifdef MSL_NUMBERED_LANES
    // Where simdgroups lie in rows, only x depends on the numbers of the lanes.
    position.x = (threadIdx.x & ~31u) | index & 31u;
    const bool is_known = blockDim.x % 32 == 0 || blockDim.y * blockDim.z == 1;
#else
    const bool is_known = true;
#endif
    if (is_known && size.x == blockDim.x && size.y == blockDim.y && size.z == blockDim.z) return true;
    if (index >= size.x * size.y * size.z) return false;
    position = {index % size.x, index / size.x % size.y, index / (size.x * size.y)};
    return true;
  }

 private:
  static METAL_FUNC uint32_t extent(const Grid& grid, uint32_t dimension, uint32_t threadgroup) {
    uint32_t whole = grid.threads_per_threadgroup[dimension];
    uint32_t remaining = grid.threads_per_grid[dimension] - threadgroup * whole;
    return remaining < whole ? remaining : whole;
  }
};

// Thread positions ------------------------------------------------------------------------------------------------

#define MSL_POSITION(name, expression)                                                    \
  struct name {                                                                           \
    template <class Parameter>                                                            \
    METAL_FUNC auto as(const Grid& grid, const Place& place) const {                      \
      return from_uint3<std::remove_const_t<Parameter>>::make(expression);                \
    }                                                                                     \
  };
#define MSL_OF(array) (Uint3{array[0], array[1], array[2]})
MSL_POSITION(position_in_grid, (Uint3{place.threadgroup.x * grid.threads_per_threadgroup[0] + place.position.x,
                                      place.threadgroup.y * grid.threads_per_threadgroup[1] + place.position.y,
                                      place.threadgroup.z * grid.threads_per_threadgroup[2] + place.position.z}))
MSL_POSITION(position_in_threadgroup, place.position)
MSL_POSITION(threadgroup_position, place.threadgroup)
MSL_POSITION(threads_per_grid, MSL_OF(grid.threads_per_grid))
MSL_POSITION(grid_origin, (Uint3{0, 0, 0}))
MSL_POSITION(threads_per_threadgroup, place.size)
MSL_POSITION(dispatch_threads_per_threadgroup, MSL_OF(grid.threads_per_threadgroup))
MSL_POSITION(threadgroups_per_grid, MSL_OF(grid.threadgroups_per_grid))
#undef MSL_OF

METAL_FUNC uint32_t volume(Uint3 size) { return size.x * size.y * size.z; }
METAL_FUNC uint32_t volume(const uint32_t (&size)[3]) { return size[0] * size[1] * size[2]; }
#define MSL_INDEX(name, expression) MSL_POSITION(name, (Uint3{expression, 0, 0}))
MSL_INDEX(index_in_threadgroup, place.index)
MSL_INDEX(index_in_simdgroup, place.index % kSimdWidth)
MSL_INDEX(simdgroup_index, place.index / kSimdWidth)
MSL_INDEX(simdgroups, (volume(place.size) + kSimdWidth - 1) / kSimdWidth)
MSL_INDEX(dispatch_simdgroups, (volume(grid.threads_per_threadgroup) + kSimdWidth - 1) / kSimdWidth)
MSL_INDEX(threads_per_simdgroup, kSimdWidth)
MSL_INDEX(index_in_quadgroup, place.index % 4)
MSL_INDEX(quadgroup_index, place.index / 4)
MSL_INDEX(quadgroups, (volume(place.size) + 3) / 4)
MSL_INDEX(dispatch_quadgroups, (volume(grid.threads_per_threadgroup) + 3) / 4)
#undef MSL_INDEX
#undef MSL_POSITION

// Arguments -------------------------------------------------------------------------------------------------------

// Makes the parameter, a pointer or a reference, from an address.
template <class Parameter>
struct from_address;
template <class T>
struct from_address<T*> {
  static METAL_FUNC T* make(void* address) { return static_cast<T*>(address); }
};
template <class T>
struct from_address<T* const> : from_address<T*> {};
template <class T>
struct from_address<T&> {
  static METAL_FUNC T& make(void* address) { return *static_cast<T*>(address); }
};

struct Address {
  void* address;

  template <class Parameter>
  METAL_FUNC Parameter as(const Grid&, const Place&) const {
    return from_address<Parameter>::make(address);
  }
};

METAL_FUNC Address buffer(void* address) { return {address}; }
METAL_FUNC Address absent() { return {nullptr}; }
METAL_FUNC Address threadgroup_argument(uint64_t offset) {
  extern __shared__ uint4 dynamic_threadgroup_memory[];
  return {reinterpret_cast<unsigned char*>(dynamic_threadgroup_memory) + offset};
}

// Bytes lie in constant memory, because kernels only read them.
template <uint32_t capacity>
struct InlineBytes {
  const unsigned char* address;

  template <class Parameter>
  METAL_FUNC Parameter as(const Grid&, const Place&) const {
    using T = std::remove_reference_t<Parameter>;
    if constexpr (std::is_reference_v<Parameter>)
      static_assert(sizeof(T) <= capacity, "fewer bytes are bound than the argument's type has");
    return from_address<Parameter>::make(const_cast<unsigned char*>(address));
  }
};
template <uint32_t capacity>
METAL_FUNC InlineBytes<capacity> bytes(const Bytes<capacity>& block) {
  return {block.bytes};
}

// An argument that is bound only if a function constant is true.
template <bool condition, class Binding>
METAL_FUNC auto given(const Binding& binding) {
  if constexpr (condition) return binding;
  else return absent();
}

// Kernels ---------------------------------------------------------------------------------------------------------

// Waits until the kernels before this one in the stream have ended and their writes can be seen. From compute
// capability 9.0 on a kernel may be launched earlier than that (see csrc/backends/cuda/launches.cpp).
METAL_FUNC void await_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream be launched, once all threadgroups of this one have called it or ended.
METAL_FUNC void begin_later_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Lets the next kernel of the stream be launched, and then waits for those before this one, except where the program's
// kernels do both themselves (kernels/common/earlier.h).
METAL_FUNC void follow() {
#ifndef MSL_KERNELS_WAIT
  begin_later_kernels();
  await_earlier_kernels();
#endif
}

template <int i, class First, class... Rest>
struct type_at : type_at<i - 1, Rest...> {};
template <class First, class... Rest>
struct type_at<0, First, Rest...> {
  using type = First;
};

template <auto function>
struct Caller;
template <class... Parameters, void (*function)(Parameters...)>
struct Caller<function> {
  template <class... Bindings>
  static METAL_FUNC void call(const Grid& grid, const Bindings&... bindings) {
    follow();
    Place place;
    if (place.find(grid)) function(bindings.template as<Parameters>(grid, place)...);
  }

  // Bytes with room for one element of the type that parameter i points to.
  template <int i>
  static constexpr uint32_t room() {
    using Parameter = typename type_at<i, Parameters...>::type;
    return (sizeof(std::remove_pointer_t<std::remove_reference_t<Parameter>>) + 15) / 16 * 16;
  }
};

}  // namespace msl

// In the place of the functions in kernels/common/earlier.h.
METAL_FUNC void metalcore_begin_later_kernels(int) { msl::begin_later_kernels(); }
METAL_FUNC void metalcore_await_earlier_kernels(int) { msl::await_earlier_kernels(); }
// In the place of the functions in kernels/common/together.h.
METAL_FUNC void metalcore_synchronize_together(int) {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
METAL_FUNC void metalcore_leave_together(int) {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
METAL_FUNC float2 metalcore_load_together(const float2* address, uint32_t number, int) {
  float2 found = float2(0.0f);
#if __CUDA_ARCH__ >= 900
  const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  float x, y;
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %2, %3; ld.shared::cluster.v2.f32 {%0, %1}, [a]; }"
               : "=f"(x), "=f"(y) : "r"(own), "r"(number) : "memory");
  found = float2(x, y);
#endif
  return found;
}
METAL_FUNC float4 metalcore_load_together(const float4* address, uint32_t number, int) {
  float4 found = float4(0.0f);
#if __CUDA_ARCH__ >= 900
  const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  float x, y, z, w;
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [a]; }"
               : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(own), "r"(number) : "memory");
  found = float4(x, y, z, w);
#endif
  return found;
}
// It is made to depend on the addresses, so the compiler computes them before. Their bits and those of the block's size
// together are never 0.
template <class T, uint32_t count>
METAL_FUNC void metalcore_await_earlier_kernels(T* const (&addresses)[count], int) {
#if __CUDA_ARCH__ >= 900
  uint64_t all = blockDim.x;
#pragma unroll
  for (uint32_t i = 0; i < count; ++i) all |= reinterpret_cast<uint64_t>(addresses[i]);
  asm volatile("{ .reg .pred p; setp.ne.u64 p, %0, 0; @p griddepcontrol.wait; }" ::"l"(all) : "memory");
#endif
}

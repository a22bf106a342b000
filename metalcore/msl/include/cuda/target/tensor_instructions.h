// The instructions with which tiles in shared memory are multiplied: wgmma on Hopper, ldmatrix and mma elsewhere.
#pragma once

#include "metal/types.h"
#include "target/runtime.h"

namespace msl {

template <int n>
struct Columns {};

#if __CUDA_ARCH_FEAT_SM90_ALL
#define MSL_TEN(tens)                                                                                    \
  ", %" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens \
  "7"                                                                                                    \
  ", %" #tens "8, %" #tens "9"
#define MSL_4 "%0, %1, %2, %3"
#define MSL_8 MSL_4 ", %4, %5, %6, %7"
#define MSL_16 MSL_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MSL_32 MSL_16 ", %16, %17, %18, %19" MSL_TEN(2) ", %30, %31"
#define MSL_64 MSL_32 ", %32, %33, %34, %35, %36, %37, %38, %39" MSL_TEN(4) MSL_TEN(5) ", %60, %61, %62, %63"
#define MSL_128 \
  MSL_64 ", %64, %65, %66, %67, %68, %69" MSL_TEN(7) MSL_TEN(8) MSL_TEN(9) MSL_TEN(10) MSL_TEN(11) ", " \
         "%120, %121, %122, %123, %124, %125, %126, %127"
#define MSL_SUMS_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define MSL_SUMS_8(i) MSL_SUMS_4(i), MSL_SUMS_4(i + 4)
#define MSL_SUMS_16(i) MSL_SUMS_8(i), MSL_SUMS_8(i + 8)
#define MSL_SUMS_32(i) MSL_SUMS_16(i), MSL_SUMS_16(i + 16)
#define MSL_SUMS_64(i) MSL_SUMS_32(i), MSL_SUMS_32(i + 32)
#define MSL_SUMS_128(i) MSL_SUMS_64(i), MSL_SUMS_64(i + 64)
// 64 rows by n columns: c += a b, for 16 terms in shared memory, or c = a b. `across_…` tells of outer elements that
// are packed. The second function has the left operand in registers.
#define MSL_WARPGROUP_PRODUCT(T, name, n, registers, a, b, across_a, across_b, adding, across)                         \
  template <bool left_across, bool right_across, bool adds = true>                                                     \
  METAL_FUNC void multiply_warpgroup(Columns<n>, T, float* c, uint64_t left, uint64_t right) {                         \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %" #adding ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name \
                 "." name " {" MSL_##registers "}, %" #a ", %" #b ", p, 1, 1, %" #across_a ", %" #across_b ";}"        \
                 : MSL_SUMS_##registers(0)                                                                             \
                 : "l"(left), "l"(right), "n"(int(left_across)), "n"(int(right_across)), "n"(int(adds)));              \
  }                                                                                                                    \
  template <bool right_across>                                                                                         \
  METAL_FUNC void multiply_warpgroup(Columns<n>, T, float* c, const uint32_t (&left)[4], uint64_t right) {             \
    asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name   \
                 " {" MSL_##registers "}, {%" #a ", %" #b ", %" #across_a ", %" #across_b "}, %" #adding               \
                                      ", p, 1, 1, %" #across ";}"                                                      \
                 : MSL_SUMS_##registers(0)                                                                             \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "n"(int(right_across)));        \
  }
#define MSL_WARPGROUP_PRODUCTS(T, name)                           \
  MSL_WARPGROUP_PRODUCT(T, name, 8, 4, 4, 5, 6, 7, 8, 9)          \
  MSL_WARPGROUP_PRODUCT(T, name, 16, 8, 8, 9, 10, 11, 12, 13)     \
  MSL_WARPGROUP_PRODUCT(T, name, 32, 16, 16, 17, 18, 19, 20, 21)  \
  MSL_WARPGROUP_PRODUCT(T, name, 64, 32, 32, 33, 34, 35, 36, 37)  \
  MSL_WARPGROUP_PRODUCT(T, name, 128, 64, 64, 65, 66, 67, 68, 69) \
  MSL_WARPGROUP_PRODUCT(T, name, 256, 128, 128, 129, 130, 131, 132, 133)
MSL_WARPGROUP_PRODUCTS(metal::half, "f16")
MSL_WARPGROUP_PRODUCTS(metal::bfloat, "bf16")
constexpr bool kHasWarpgroups = true;
#else
template <bool left_across, bool right_across, class N, class T>
METAL_FUNC void multiply_warpgroup(N, T, float*, uint64_t, uint64_t) {}
constexpr bool kHasWarpgroups = false;
#endif

// Four 8 by 8 matrices of shared memory; each lane has the address of a row of one.
template <bool transposed>
METAL_FUNC void load_matrices(uint32_t (&to)[4], uint32_t address) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
#define MSL_SIMDGROUP_PRODUCT(T, name)                                                                   \
  METAL_FUNC void multiply_simdgroup(T, float* c, const uint32_t (&a)[4], uint32_t b, uint32_t next_b) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                  \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                  \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next_b));                     \
  }
MSL_SIMDGROUP_PRODUCT(metal::half, "f16")
MSL_SIMDGROUP_PRODUCT(metal::bfloat, "bf16")
#undef MSL_SIMDGROUP_PRODUCT

// Waits until at most `pending` of the groups of copies that this thread has begun are under way.
template <int pending>
METAL_FUNC void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
// The same for the groups of products of a warpgroup.
template <int pending = 0>
METAL_FUNC void wait_for_products() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#endif
}

}  // namespace msl

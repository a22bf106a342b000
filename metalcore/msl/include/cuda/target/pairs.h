// Sums, differences and products of vectors of half or bfloat, by pairs of elements in one register: no conversions to
// float and back, and the same bits. For bfloat only fma has such instructions on all GPUs from 8.0 on.
#pragma once

namespace metal {

template <class T, int N>
struct vec;

}  // namespace metal

namespace msl {

template <class T>
constexpr bool has_pairs = is_small_float<T>::value && __CUDA_ARCH__ >= 800;

#define MSL_PAIRS(name, of_halves, of_bfloats)                                         \
  METAL_FUNC uint32_t name(small_float<half_format>, uint32_t a, uint32_t b) {         \
    uint32_t c;                                                                        \
    asm(of_halves : "=r"(c) : "r"(a), "r"(b));                                         \
    return c;                                                                          \
  }                                                                                    \
  METAL_FUNC uint32_t name(small_float<bfloat_format>, uint32_t a, uint32_t b) {       \
    uint32_t c;                                                                        \
    asm("{ .reg .b32 constant; " of_bfloats "; }" : "=r"(c) : "r"(a), "r"(b));              \
    return c;                                                                          \
  }                                                                                    \
  template <class T, int N>                                                            \
  METAL_FUNC metal::vec<T, N> name(const metal::vec<T, N>& a, const metal::vec<T, N>& b) { \
    struct Words {                                                                     \
      uint32_t word[N / 2];                                                            \
    };                                                                                 \
    Words x = bit_cast<Words>(a);                                                      \
    const Words y = bit_cast<Words>(b);                                                \
    MSL_UNROLL                                                                         \
    for (int i = 0; i < N / 2; ++i) x.word[i] = name(T(), x.word[i], y.word[i]);       \
    return bit_cast<metal::vec<T, N>>(x);                                              \
  }
MSL_PAIRS(sums_of_pairs, "add.rn.f16x2 %0, %1, %2;", "mov.b32 constant, 0x3f803f80; fma.rn.bf16x2 %0, %1, constant, %2")
MSL_PAIRS(differences_of_pairs, "sub.rn.f16x2 %0, %1, %2;", "mov.b32 constant, 0xbf80bf80; fma.rn.bf16x2 %0, %2, constant, %1")
MSL_PAIRS(products_of_pairs, "mul.rn.f16x2 %0, %1, %2;", "mov.b32 constant, 0x80008000; fma.rn.bf16x2 %0, %1, %2, constant")
#undef MSL_PAIRS

}  // namespace msl

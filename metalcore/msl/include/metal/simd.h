// The types of <simd/simd.h>, for headers that a program shares with the host's code.
#pragma once

#include "metal/matrix.h"
#include "metal/types.h"

#define MSL_SIMD_VECTORS(T, name)     \
  using vector_##name##2 = metal::vec<T, 2>; \
  using vector_##name##3 = metal::vec<T, 3>; \
  using vector_##name##4 = metal::vec<T, 4>; \
  using simd_##name##2 = metal::vec<T, 2>;   \
  using simd_##name##3 = metal::vec<T, 3>;   \
  using simd_##name##4 = metal::vec<T, 4>;   \
  using simd_##name##1 = T;                  \
  namespace simd {                           \
  using name##2 = metal::vec<T, 2>;          \
  using name##3 = metal::vec<T, 3>;          \
  using name##4 = metal::vec<T, 4>;          \
  }
MSL_SIMD_VECTORS(char, char)
MSL_SIMD_VECTORS(uchar, uchar)
MSL_SIMD_VECTORS(short, short)
MSL_SIMD_VECTORS(ushort, ushort)
MSL_SIMD_VECTORS(int, int)
MSL_SIMD_VECTORS(uint, uint)
MSL_SIMD_VECTORS(long, long)
MSL_SIMD_VECTORS(ulong, ulong)
MSL_SIMD_VECTORS(half, half)
MSL_SIMD_VECTORS(float, float)
#undef MSL_SIMD_VECTORS

#define MSL_SIMD_MATRICES(C, R)                    \
  using matrix_float##C##x##R = metal::float##C##x##R; \
  using matrix_half##C##x##R = metal::half##C##x##R;   \
  using simd_float##C##x##R = metal::float##C##x##R;   \
  using simd_half##C##x##R = metal::half##C##x##R;     \
  namespace simd {                                 \
  using metal::float##C##x##R;                     \
  using metal::half##C##x##R;                      \
  }
MSL_SIMD_MATRICES(2, 2) MSL_SIMD_MATRICES(2, 3) MSL_SIMD_MATRICES(2, 4)
MSL_SIMD_MATRICES(3, 2) MSL_SIMD_MATRICES(3, 3) MSL_SIMD_MATRICES(3, 4)
MSL_SIMD_MATRICES(4, 2) MSL_SIMD_MATRICES(4, 3) MSL_SIMD_MATRICES(4, 4)
#undef MSL_SIMD_MATRICES

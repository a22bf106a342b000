// The names of vectors, as float4 and packed_float4, and the vectors of the second reading.
#pragma once

#ifndef __OPENCL_CPP_VERSION__
// Vectors of the second reading, which are Clang's own as Apple's compiler has them: they tell what a class cannot,
// such as that a component has no address. Packed vectors differ in alignment only.
namespace metal {

template <class T, int N>
using packed_vec = vec<T, N>;

}  // namespace metal

namespace msl {
// float4(a, b), which Clang's C++ has not: text.py makes it a call of this.
template <class V, class... A>
V vector(A...);
}  // namespace msl
#endif

#define MSL_NAMES(T)                             \
  using T##2 = metal::vec<T, 2>;                 \
  using T##3 = metal::vec<T, 3>;                 \
  using T##4 = metal::vec<T, 4>;                 \
  using packed_##T##2 = metal::packed_vec<T, 2>; \
  using packed_##T##3 = metal::packed_vec<T, 3>; \
  using packed_##T##4 = metal::packed_vec<T, 4>; \
  namespace metal {                              \
  using ::T##2;                                  \
  using ::T##3;                                  \
  using ::T##4;                                  \
  using ::packed_##T##2;                         \
  using ::packed_##T##3;                         \
  using ::packed_##T##4;                         \
  }
MSL_NAMES(bool)
MSL_NAMES(char)
MSL_NAMES(uchar)
MSL_NAMES(short)
MSL_NAMES(ushort)
MSL_NAMES(int)
MSL_NAMES(uint)
MSL_NAMES(long)
MSL_NAMES(ulong)
MSL_NAMES(half)
MSL_NAMES(bfloat)
MSL_NAMES(float)

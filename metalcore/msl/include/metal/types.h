// The names of MSL's scalar, vector and packed types, in the global namespace and in metal.
#pragma once

#include "metal/packed.h"

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;

#define MSL_VECTORS_OF(T)                 \
  using T##2 = metal::vec<T, 2>;          \
  using T##3 = metal::vec<T, 3>;          \
  using T##4 = metal::vec<T, 4>;          \
  using packed_##T##2 = metal::packed_vec<T, 2>; \
  using packed_##T##3 = metal::packed_vec<T, 3>; \
  using packed_##T##4 = metal::packed_vec<T, 4>; \
  namespace metal {                       \
  using MSL_ROOT::T##2;                           \
  using MSL_ROOT::T##3;                           \
  using MSL_ROOT::T##4;                           \
  using MSL_ROOT::packed_##T##2;                  \
  using MSL_ROOT::packed_##T##3;                  \
  using MSL_ROOT::packed_##T##4;                  \
  }

MSL_VECTORS_OF(bool)
MSL_VECTORS_OF(char)
MSL_VECTORS_OF(uchar)
MSL_VECTORS_OF(short)
MSL_VECTORS_OF(ushort)
MSL_VECTORS_OF(int)
MSL_VECTORS_OF(uint)
MSL_VECTORS_OF(long)
MSL_VECTORS_OF(ulong)
MSL_VECTORS_OF(half)
MSL_VECTORS_OF(bfloat)
MSL_VECTORS_OF(float)
#undef MSL_VECTORS_OF

namespace metal {

using MSL_ROOT::bfloat;
using MSL_ROOT::half;
using MSL_ROOT::int16_t;
using MSL_ROOT::int32_t;
using MSL_ROOT::int64_t;
using MSL_ROOT::int8_t;
using MSL_ROOT::intptr_t;
using MSL_ROOT::ptrdiff_t;
using MSL_ROOT::size_t;
using MSL_ROOT::uchar;
using MSL_ROOT::uint;
using MSL_ROOT::uint16_t;
using MSL_ROOT::uint32_t;
using MSL_ROOT::uint64_t;
using MSL_ROOT::uint8_t;
using MSL_ROOT::uintptr_t;
using MSL_ROOT::ulong;
using MSL_ROOT::ushort;

// A value that is the same for every thread: a promise to the compiler, which nothing here uses.
template <class T>
using uniform = T;

}  // namespace metal

// The bits of one type read as another of the same size.
template <class To, class From>
METAL_FUNC constexpr To as_type(const From& from) {
  return msl::bit_cast<To>(from);
}

namespace metal {
using MSL_ROOT::as_type;
}

// <metal_math>, <metal_common>, <metal_geometric>, <metal_relational>: one overload for each type, as in Apple's
// headers, so that mixed arguments are ambiguous as they are there.
#pragma once

#define MSL_FLOATS_OF(X, T) X(T, T, bool, int) X(T##2, T, bool2, int2) X(T##3, T, bool3, int3) X(T##4, T, bool4, int4)
#define MSL_INTEGERS_OF(X, T) X(T) X(T##2) X(T##3) X(T##4)
#define MSL_INTEGERS(X)                                                                                     \
  MSL_INTEGERS_OF(X, char) MSL_INTEGERS_OF(X, uchar) MSL_INTEGERS_OF(X, short) MSL_INTEGERS_OF(X, ushort)   \
  MSL_INTEGERS_OF(X, int) MSL_INTEGERS_OF(X, uint) MSL_INTEGERS_OF(X, long) MSL_INTEGERS_OF(X, ulong)

// V is the type, E its element type, B and I are the bool and int types of its width.
#define MSL_MATH(V, E, B, I)                                                                                   \
  constexpr V acos(V); constexpr V acosh(V); constexpr V asin(V); constexpr V asinh(V); constexpr V atan(V);   \
  constexpr V atan2(V, V); constexpr V atanh(V); constexpr V ceil(V); constexpr V copysign(V, V);              \
  constexpr V cos(V); constexpr V cosh(V); constexpr V cospi(V); constexpr V divide(V, V); constexpr V exp(V); \
  constexpr V exp10(V); constexpr V exp2(V); constexpr V fabs(V); constexpr V abs(V); constexpr V fdim(V, V);  \
  constexpr V floor(V); constexpr V fma(V, V, V); constexpr V fmax(V, V); constexpr V max(V, V);               \
  constexpr V fmin(V, V); constexpr V min(V, V); constexpr V fmax3(V, V, V); constexpr V max3(V, V, V);        \
  constexpr V fmin3(V, V, V); constexpr V min3(V, V, V); constexpr V fmedian3(V, V, V);                        \
  constexpr V median3(V, V, V); constexpr V fmod(V, V); constexpr V fract(V); V frexp(V, __private I&);        \
  constexpr I ilogb(V); constexpr V ldexp(V, I); constexpr V log(V); constexpr V log10(V); constexpr V log2(V); \
  V modf(V, __private V&); constexpr V nextafter(V, V); constexpr V pow(V, V); constexpr V powr(V, V);         \
  constexpr V rint(V); constexpr V round(V); constexpr V rsqrt(V); constexpr V sin(V); V sincos(V, __private V&); \
  constexpr V sinh(V); constexpr V sinpi(V); constexpr V sqrt(V); constexpr V tan(V); constexpr V tanh(V);     \
  constexpr V tanpi(V); constexpr V trunc(V); constexpr V clamp(V, V, V); constexpr V mix(V, V, V);            \
  constexpr V saturate(V); constexpr V sign(V); constexpr V smoothstep(V, V, V); constexpr V step(V, V);
#define MSL_RELATIONAL(V, E, B, I)                                                                             \
  constexpr V select(V, V, B); constexpr B isfinite(V); constexpr B isinf(V); constexpr B isnan(V);            \
  constexpr B isnormal(V); constexpr B signbit(V); constexpr B isordered(V, V); constexpr B isunordered(V, V);
#define MSL_SELECT_OF(V, E, B, I) constexpr V select(V, V, B);
#define MSL_GEOMETRIC(V, E, B, I)                                                                              \
  constexpr E dot(V, V); constexpr E length(V); constexpr E length_squared(V); constexpr E distance(V, V);     \
  constexpr E distance_squared(V, V); constexpr V normalize(V); constexpr V reflect(V, V);                     \
  constexpr V refract(V, V, E); constexpr V faceforward(V, V, V);
#define MSL_VECTORS_OF(X, T) X(T##2, T, bool2, int2) X(T##3, T, bool3, int3) X(T##4, T, bool4, int4)

namespace metal {

MSL_FLOATS_OF(MSL_MATH, float)
MSL_FLOATS_OF(MSL_MATH, half)
MSL_FLOATS_OF(MSL_RELATIONAL, float)
MSL_FLOATS_OF(MSL_RELATIONAL, half)
MSL_VECTORS_OF(MSL_GEOMETRIC, float)
MSL_VECTORS_OF(MSL_GEOMETRIC, half)
MSL_FLOATS_OF(MSL_SELECT_OF, bfloat)
constexpr float3 cross(float3, float3);
constexpr half3 cross(half3, half3);

namespace fast {
MSL_FLOATS_OF(MSL_MATH, float)
MSL_VECTORS_OF(MSL_GEOMETRIC, float)
}  // namespace fast
namespace precise {
MSL_FLOATS_OF(MSL_MATH, float)
MSL_VECTORS_OF(MSL_GEOMETRIC, float)
}  // namespace precise

constexpr bool all(bool); constexpr bool all(bool2); constexpr bool all(bool3); constexpr bool all(bool4);
constexpr bool any(bool); constexpr bool any(bool2); constexpr bool any(bool3); constexpr bool any(bool4);
constexpr bool select(bool, bool, bool); constexpr bool2 select(bool2, bool2, bool2);
constexpr bool3 select(bool3, bool3, bool3); constexpr bool4 select(bool4, bool4, bool4);

}  // namespace metal

// The bits of one type read as another of the same size.
template <class To, class From, class = metal::enable_if_t<sizeof(To) == sizeof(From)>>
constexpr To as_type(From) {
  return To();
}
namespace metal {
using ::as_type;
}

// <metal_integer>, the integers' part of <metal_common>, and packing.
#define MSL_INTEGER(V)                                                                                          \
  constexpr V min(V, V); constexpr V max(V, V); constexpr V min3(V, V, V); constexpr V max3(V, V, V);           \
  constexpr V median3(V, V, V); constexpr V clamp(V, V, V); constexpr V clz(V); constexpr V ctz(V);             \
  constexpr V popcount(V); constexpr V reverse_bits(V); constexpr V rotate(V, V); constexpr V addsat(V, V);     \
  constexpr V subsat(V, V); constexpr V hadd(V, V); constexpr V rhadd(V, V); constexpr V mulhi(V, V);           \
  constexpr V madhi(V, V, V); constexpr V madsat(V, V, V); constexpr V extract_bits(V, uint, uint);             \
  constexpr V insert_bits(V, V, uint, uint); constexpr make_unsigned_t<V> absdiff(V, V);
#define MSL_24(V) constexpr V mul24(V, V); constexpr V mad24(V, V, V);
#define MSL_SIGNED(V) constexpr make_unsigned_t<V> abs(V);
#define MSL_UNSIGNED(V) constexpr V abs(V);
#define MSL_SELECT(T)                                                                          \
  constexpr T select(T, T, bool); constexpr T##2 select(T##2, T##2, bool2);                    \
  constexpr T##3 select(T##3, T##3, bool3); constexpr T##4 select(T##4, T##4, bool4);

namespace metal {

MSL_INTEGERS(MSL_INTEGER)
MSL_INTEGERS_OF(MSL_24, int) MSL_INTEGERS_OF(MSL_24, uint)
// abs() of a signed integer is of its own type.
#undef MSL_SIGNED
#define MSL_SIGNED(V) constexpr V abs(V);
MSL_INTEGERS(MSL_SIGNED)
MSL_SELECT(char) MSL_SELECT(uchar) MSL_SELECT(short) MSL_SELECT(ushort) MSL_SELECT(int) MSL_SELECT(uint)
MSL_SELECT(long) MSL_SELECT(ulong)

#define MSL_PACKING(N, M)                                                                             \
  constexpr uint pack_float_to_snorm##N(float##M); constexpr uint pack_float_to_unorm##N(float##M);   \
  constexpr float##M unpack_snorm##N##_to_float(uint); constexpr float##M unpack_unorm##N##_to_float(uint); \
  constexpr uint pack_half_to_snorm##N(half##M); constexpr uint pack_half_to_unorm##N(half##M);       \
  constexpr half##M unpack_snorm##N##_to_half(uint); constexpr half##M unpack_unorm##N##_to_half(uint);
MSL_PACKING(4x8, 4) MSL_PACKING(2x16, 2)
#undef MSL_PACKING

}  // namespace metal

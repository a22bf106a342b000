// <metal_integer>, the integers' part of <metal_common>, and packing.
#pragma once

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

#define MSL_PACKING(N, Packed)                                                              \
  constexpr Packed pack_float_to_snorm##N(float4); constexpr Packed pack_float_to_unorm##N(float4); \
  constexpr float4 unpack_snorm##N##_to_float(Packed); constexpr float4 unpack_unorm##N##_to_float(Packed); \
  constexpr Packed pack_half_to_snorm##N(half4); constexpr Packed pack_half_to_unorm##N(half4); \
  constexpr half4 unpack_snorm##N##_to_half(Packed); constexpr half4 unpack_unorm##N##_to_half(Packed);
MSL_PACKING(4x8, uint)
#undef MSL_PACKING
#define MSL_PACKING(N, Packed)                                                              \
  constexpr Packed pack_float_to_snorm##N(float2); constexpr Packed pack_float_to_unorm##N(float2); \
  constexpr float2 unpack_snorm##N##_to_float(Packed); constexpr float2 unpack_unorm##N##_to_float(Packed); \
  constexpr Packed pack_half_to_snorm##N(half2); constexpr Packed pack_half_to_unorm##N(half2); \
  constexpr half2 unpack_snorm##N##_to_half(Packed); constexpr half2 unpack_unorm##N##_to_half(Packed);
MSL_PACKING(2x16, uint)
#undef MSL_PACKING

}  // namespace metal

// Packing of normalized numbers into integers and back.
#pragma once

#include "metal/common.h"

namespace msl {

// A field of `bits` bits at `offset` as a fraction of its largest value.
METAL_MATH float unpack_unorm(uint32_t packed, int offset, int bits) {
  uint32_t greatest = (1u << bits) - 1;
  return float(packed >> offset & greatest) / float(greatest);
}
METAL_MATH float unpack_snorm(uint32_t packed, int offset, int bits) {
  int field = int(packed << (32 - bits - offset)) >> (32 - bits);
  float value = float(field) / float((1 << (bits - 1)) - 1);
  return value < -1.0f ? -1.0f : value;
}
METAL_MATH uint32_t pack_unorm(float value, int offset, int bits) {
  return uint32_t(math::rint(metal::saturate(value) * float((1u << bits) - 1))) << offset;
}
METAL_MATH uint32_t pack_snorm(float value, int offset, int bits) {
  int field = int(math::rint(metal::clamp(value, -1.0f, 1.0f) * float((1 << (bits - 1)) - 1)));
  return (uint32_t(field) & ((1u << bits) - 1)) << offset;
}
METAL_MATH float srgb_to_linear(float c) {
  return c <= 0.04045f ? c / 12.92f : math::powr((c + 0.055f) / 1.055f, 2.4f);
}
METAL_MATH float linear_to_srgb(float c) {
  c = metal::saturate(c);
  return c < 0.0031308f ? c * 12.92f : 1.055f * math::powr(c, 1.0f / 2.4f) - 0.055f;
}

}  // namespace msl

namespace metal {

// Defines unpack_F_to_float/half and pack_float/half_to_F for a format F.
#define MSL_UNPACK(name, Packed, N, ...)                                                       \
  METAL_MATH vec<float, N> unpack_##name##_to_float(Packed p) { return {__VA_ARGS__}; }        \
  METAL_MATH vec<half, N> unpack_##name##_to_half(Packed p) { return vec<half, N>(unpack_##name##_to_float(p)); }
MSL_UNPACK(unorm4x8, uint, 4, msl::unpack_unorm(p, 0, 8), msl::unpack_unorm(p, 8, 8), msl::unpack_unorm(p, 16, 8),
           msl::unpack_unorm(p, 24, 8))
MSL_UNPACK(snorm4x8, uint, 4, msl::unpack_snorm(p, 0, 8), msl::unpack_snorm(p, 8, 8), msl::unpack_snorm(p, 16, 8),
           msl::unpack_snorm(p, 24, 8))
MSL_UNPACK(unorm4x8_srgb, uint, 4, msl::srgb_to_linear(msl::unpack_unorm(p, 0, 8)),
           msl::srgb_to_linear(msl::unpack_unorm(p, 8, 8)), msl::srgb_to_linear(msl::unpack_unorm(p, 16, 8)),
           msl::unpack_unorm(p, 24, 8))
MSL_UNPACK(unorm2x16, uint, 2, msl::unpack_unorm(p, 0, 16), msl::unpack_unorm(p, 16, 16))
MSL_UNPACK(snorm2x16, uint, 2, msl::unpack_snorm(p, 0, 16), msl::unpack_snorm(p, 16, 16))
MSL_UNPACK(unorm10a2, uint, 4, msl::unpack_unorm(p, 0, 10), msl::unpack_unorm(p, 10, 10), msl::unpack_unorm(p, 20, 10),
           msl::unpack_unorm(p, 30, 2))
MSL_UNPACK(unorm565, ushort, 3, msl::unpack_unorm(p, 11, 5), msl::unpack_unorm(p, 5, 6), msl::unpack_unorm(p, 0, 5))
#undef MSL_UNPACK

#define MSL_PACK(name, Packed, N, expression)                                                            \
  METAL_MATH Packed pack_float_to_##name(const vec<float, N>& v) { return Packed(expression); }          \
  METAL_MATH Packed pack_half_to_##name(const vec<half, N>& v) { return pack_float_to_##name(vec<float, N>(v)); }
MSL_PACK(unorm4x8, uint, 4,
         msl::pack_unorm(v.x, 0, 8) | msl::pack_unorm(v.y, 8, 8) | msl::pack_unorm(v.z, 16, 8) |
             msl::pack_unorm(v.w, 24, 8))
MSL_PACK(snorm4x8, uint, 4,
         msl::pack_snorm(v.x, 0, 8) | msl::pack_snorm(v.y, 8, 8) | msl::pack_snorm(v.z, 16, 8) |
             msl::pack_snorm(v.w, 24, 8))
MSL_PACK(srgb_unorm4x8, uint, 4,
         msl::pack_unorm(msl::linear_to_srgb(v.x), 0, 8) | msl::pack_unorm(msl::linear_to_srgb(v.y), 8, 8) |
             msl::pack_unorm(msl::linear_to_srgb(v.z), 16, 8) | msl::pack_unorm(v.w, 24, 8))
MSL_PACK(unorm2x16, uint, 2, msl::pack_unorm(v.x, 0, 16) | msl::pack_unorm(v.y, 16, 16))
MSL_PACK(snorm2x16, uint, 2, msl::pack_snorm(v.x, 0, 16) | msl::pack_snorm(v.y, 16, 16))
MSL_PACK(unorm10a2, uint, 4,
         msl::pack_unorm(v.x, 0, 10) | msl::pack_unorm(v.y, 10, 10) | msl::pack_unorm(v.z, 20, 10) |
             msl::pack_unorm(v.w, 30, 2))
MSL_PACK(unorm565, ushort, 3, msl::pack_unorm(v.x, 11, 5) | msl::pack_unorm(v.y, 5, 6) | msl::pack_unorm(v.z, 0, 5))
#undef MSL_PACK

}  // namespace metal

// Conversions between 16-bit floats and float in integer arithmetic. Each ends in a right shift of 32 bits: without it
// a vectorizer would compute in 16 bits as far as it could, with many more instructions.
//
// Where the CPU takes subnormal floats for zero, subnormal halves are zero as well: their bits are those of a subnormal
// float once they are shifted, and a sum of such ones tells whether the CPU sees them. (Products of them are slow, and
// Clang compares a number with zero by its bits.)
#pragma once

#include "target/runtime.h"
#include "target/standard.h"

// The bits of one type read as another of the same size.
namespace msl {

template <class To, class From>
METAL_FUNC constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

struct portable_half {
  static METAL_FUNC constexpr float widen(uint16_t bits) {
    // After the shift and an addition of 127-15 to the exponent, a normal number is right. A subnormal one gets its
    // leading bit as a number of exponent -14, from which 2^-14 is subtracted: no float on the way is subnormal, since
    // those may count as zero. Infinities and NaNs need the top exponent.
    uint32_t shifted = (bits & 0x7fffu) << 13;
    uint32_t raised = shifted + 0x38000000u;
    uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(raised + 0x00800000u) - 0x1p-14f);
    subnormal = is_zero(shifted) ? 0u : subnormal;
    uint32_t magnitude = shifted < 0x00800000u ? subnormal : raised;
    uint32_t special = shifted >= 0x0f800000u ? 0x7f800000u : 0u;
    return bit_cast<float>(magnitude | special | (bits & 0x8000u) << 16);
  }
  static METAL_FUNC constexpr float widen_rounded(uint16_t bits) { return widen(bits); }

  static METAL_FUNC constexpr uint16_t round(float value) {
    uint32_t bits = bit_cast<uint32_t>(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t nan = uint32_t(int32_t(0x7f800000u - magnitude) >> 31) & 0x02000000u;
    magnitude = magnitude < 0x47800000u ? magnitude : 0x47800000u;  // 2^16 becomes infinity
    // 2^(e + 13), where e is the exponent, or half's least exponent if that is larger. Adding it rounds the value to
    // half's last place.
    uint32_t exponent = magnitude & 0x7f800000u;
    exponent = exponent > 0x38800000u ? exponent : 0x38800000u;
    float sum = bit_cast<float>(magnitude) + bit_cast<float>(exponent + (13u << 23));
    uint32_t places = bit_cast<uint32_t>(sum) - exponent - (13u << 23);
    uint32_t result = places + (exponent >> 13) - (113u << 10);
    result = is_zero(result << 13) ? 0u : result;
    return uint16_t((result << 16 | nan | (bits & 0x80000000u)) >> 16);
  }

 private:
  static METAL_FUNC constexpr bool is_zero(uint32_t bits) {
    return bit_cast<float>(bits) + bit_cast<float>(bits) == 0.0f;
  }
};

struct portable_bfloat {
  static METAL_FUNC constexpr float widen(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }
  static METAL_FUNC constexpr float widen_rounded(uint16_t bits) { return widen(bits); }

  static METAL_FUNC constexpr uint16_t round(float value) {
    uint32_t bits = bit_cast<uint32_t>(value);
    uint32_t nan = uint32_t(int32_t(0x7f800000u - (bits & 0x7fffffffu)) >> 31);
    uint32_t increment = (0x7fffu + ((bits >> 16) & 1u)) & ~nan;
    return uint16_t(((bits + increment) | (nan & 0x00400000u)) >> 16);
  }
};

}  // namespace msl

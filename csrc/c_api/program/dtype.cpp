#include "dtype.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace metalcore::c_api {
namespace {

constexpr Dtype kDtypes[] = {
    {METALCORE_FLOAT32, "float32", "F32", 4, true},    {METALCORE_FLOAT16, "float16", "F16", 2, true},
    {METALCORE_BFLOAT16, "bfloat16", "BF16", 2, true}, {METALCORE_INT64, "int64", "I64", 8, false},
    {METALCORE_INT32, "int32", "I32", 4, false},       {METALCORE_INT16, "int16", "I16", 2, false},
    {METALCORE_INT8, "int8", "I8", 1, false},          {METALCORE_UINT8, "uint8", "U8", 1, false},
    {METALCORE_BOOL, "bool", "BOOL", 1, false},
};

float float_of_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

float float_of_half(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -small : small;
}

uint16_t bfloat16_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t half_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;               // rounds to 65536 or more
  if (magnitude < 0x38800000) {                                    // below 2^-14: a multiple of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;  // whose last bit is 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

template <typename T>
T read(const void* from, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

const Dtype* dtype_named(std::string_view name) {
  for (const Dtype& dtype : kDtypes)
    if (name == dtype.name) return &dtype;
  return nullptr;
}

const Dtype* dtype_of_code(std::string_view code) {
  for (const Dtype& dtype : kDtypes)
    if (code == dtype.code) return &dtype;
  return nullptr;
}

void convert(const void* from, const Dtype& from_dtype, void* to, const Dtype& to_dtype, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float value = from_dtype.number == METALCORE_FLOAT32   ? read<float>(from, i)
                        : from_dtype.number == METALCORE_FLOAT16 ? float_of_half(read<uint16_t>(from, i))
                                                                 : float_of_bfloat16(read<uint16_t>(from, i));
    char* const place = static_cast<char*>(to) + i * to_dtype.size;
    if (to_dtype.number == METALCORE_FLOAT32) {
      std::memcpy(place, &value, sizeof value);
    } else {
      const uint16_t bits = to_dtype.number == METALCORE_FLOAT16 ? half_of(value) : bfloat16_of(value);
      std::memcpy(place, &bits, sizeof bits);
    }
  }
}

}  // namespace metalcore::c_api

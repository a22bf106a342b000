// What the lanes of a simdgroup or a quad do with each other's values: how two are combined, and which lane's is taken.
#pragma once

#include "metal/extremes.h"
#include "metal/values.h"

namespace msl {

constexpr uint32_t kSimd = kSimdWidth;
constexpr uint32_t kQuad = 4;

struct Sum { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a + b); } };
struct Difference { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a - b); } };
struct Product { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a * b); } };
struct And { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a & b); } };
struct Or { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a | b); } };
struct Xor { template <class T> METAL_FUNC T operator()(T a, T b) const { return T(a ^ b); } };
// The same on vectors, element by element.
template <class Operation, class V>
METAL_FUNC V combine(const V& a, const V& b) {
  return V(map_all(Operation(), a, b));
}

// Lane `lane` of a group of `width` takes the value of lane of(lane, n, width), if the group has it.
struct Given { static METAL_FUNC uint32_t of(uint32_t, uint32_t n, uint32_t) { return n; } };
struct Lower { static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t) { return lane - n; } };
struct Upper { static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t) { return lane + n; } };
struct Flipped { static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t) { return lane ^ n; } };
struct RotatedUp {
  static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t width) { return (lane - n) & (width - 1); }
};
struct RotatedDown {
  static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t width) { return (lane + n) & (width - 1); }
};

}  // namespace msl

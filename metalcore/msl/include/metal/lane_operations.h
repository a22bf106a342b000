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

// Lane `lane` of a group of `width` takes the value of lane of(lane, n, width). Where that is past the group's end, MSL
// says of some operations that they keep the lane's own value, and of the others nothing. What lanes have that are in
// the group and not active MSL does not say either; Apple's GPUs give 0, which programs rely on.
struct Wrapping { static constexpr bool keeps = false; };
struct Keeping { static constexpr bool keeps = true; };
struct Given : Wrapping { static METAL_FUNC uint32_t of(uint32_t, uint32_t n, uint32_t) { return n; } };
struct Lower : Keeping { static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t) { return lane - n; } };
struct Upper : Keeping { static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t) { return lane + n; } };
struct Flipped : Wrapping { static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t) { return lane ^ n; } };
struct RotatedUp : Wrapping {
  static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t width) { return (lane - n) & (width - 1); }
};
struct RotatedDown : Wrapping {
  static METAL_FUNC uint32_t of(uint32_t lane, uint32_t n, uint32_t width) { return (lane + n) & (width - 1); }
};

}  // namespace msl

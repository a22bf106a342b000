// How the lanes of a simdgroup or a quad use each other's values: how two values are combined, and whose value a lane
// takes.
#pragma once

#include "metal/values.h"
#include "target/math.h"

// The lesser and the greater of two numbers; a NaN loses against a number.
namespace msl {

struct Min {
  template <class T>
  METAL_FUNC constexpr T operator()(T a, T b) const {
    if constexpr (std::is_same_v<T, float>) return math::least(a, b);
    else return b < a || a != a ? b : a;
  }
};
struct Max {
  template <class T>
  METAL_FUNC constexpr T operator()(T a, T b) const {
    if constexpr (std::is_same_v<T, float>) return math::greatest(a, b);
    else return a < b || a != a ? b : a;
  }
};

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

// Lane `lane` of a group of `width` takes the value of lane source_lane(lane, n, width). Where that lane is past the
// group's end, MSL defines that some operations keep the lane's own value, and leaves the others open. MSL also leaves
// open the value of an inactive lane of the group: Apple's GPUs give 0, and programs rely on it.
struct Wrapping { static constexpr bool keeps = false; };
struct Keeping { static constexpr bool keeps = true; };
struct Given : Wrapping { static METAL_FUNC uint32_t source_lane(uint32_t, uint32_t n, uint32_t) { return n; } };
struct Lower : Keeping {
  static METAL_FUNC uint32_t source_lane(uint32_t lane, uint32_t n, uint32_t) { return lane - n; }
};
struct Upper : Keeping {
  static METAL_FUNC uint32_t source_lane(uint32_t lane, uint32_t n, uint32_t) { return lane + n; }
};
struct Flipped : Wrapping {
  static METAL_FUNC uint32_t source_lane(uint32_t lane, uint32_t n, uint32_t) { return lane ^ n; }
};
struct RotatedUp : Wrapping {
  static METAL_FUNC uint32_t source_lane(uint32_t lane, uint32_t n, uint32_t width) { return (lane - n) & (width - 1); }
};
struct RotatedDown : Wrapping {
  static METAL_FUNC uint32_t source_lane(uint32_t lane, uint32_t n, uint32_t width) { return (lane + n) & (width - 1); }
};

}  // namespace msl

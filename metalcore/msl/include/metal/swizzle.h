// v.xzy is translated to v.template swizzle<0, 2, 1>() where it is read and to v.template swizzle_ref<0, 2, 1>() where
// it is assigned to.
#pragma once

#include "metal/vec.h"

namespace msl {

template <int I, class V>
METAL_FUNC constexpr auto& element(V& v) {
  static_assert(I < int(sizeof(v) / sizeof(v.x)), "no such component");
  if constexpr (I == 0)
    return v.x;
  else if constexpr (I == 1)
    return v.y;
  else if constexpr (I == 2)
    return v.z;
  else
    return v.w;
}

template <int... I, class V>
METAL_FUNC constexpr auto read_swizzle(const V& v) {
  return metal::vec<typename V::element_type, sizeof...(I)>(element<I>(v)...);
}

// The target of an assignment to a swizzle. A read of it gives the vector.
template <class V, int... I>
struct swizzle_reference {
  using element_type = typename V::element_type;
  using value_type = metal::vec<element_type, sizeof...(I)>;

  V& target;

  METAL_FUNC constexpr operator value_type() const { return read_swizzle<I...>(target); }

  METAL_FUNC constexpr const swizzle_reference& operator=(const value_type& value) const {
    size_t next = 0;
    value_type copy = value;
    ((element<I>(target) = copy[next++]), ...);
    return *this;
  }
  METAL_FUNC constexpr const swizzle_reference& operator=(const swizzle_reference& other) const {
    return *this = value_type(other);
  }

#define MSL_COMPOUND(op)                                                                              \
  METAL_FUNC constexpr const swizzle_reference& operator op##=(const value_type& value) const {       \
    return *this = value_type(*this) op value;                                                        \
  }
  MSL_COMPOUND(+) MSL_COMPOUND(-) MSL_COMPOUND(*) MSL_COMPOUND(/) MSL_COMPOUND(%)
  MSL_COMPOUND(&) MSL_COMPOUND(|) MSL_COMPOUND(^) MSL_COMPOUND(<<) MSL_COMPOUND(>>)
#undef MSL_COMPOUND
};

}  // namespace msl

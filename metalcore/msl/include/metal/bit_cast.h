// The bits of one type read as another of the same size.
#pragma once

#include "target/runtime.h"
#include "target/standard.h"

namespace msl {

template <class To, class From>
METAL_FUNC constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

}  // namespace msl

// Arithmetic of pairs of elements, which this target has not.
#pragma once

namespace msl {

template <class T>
constexpr bool has_pairs = false;

}  // namespace msl

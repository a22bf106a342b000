// Vectors of the second reading, which are Clang's own as Apple's compiler has them: they tell what a class cannot,
// such as that a component has no address. Packed vectors differ in alignment only.
#pragma once

namespace metal {

template <class T, int N>
using packed_vec = vec<T, N>;

}  // namespace metal

namespace msl {
// float4(a, b), which Clang's C++ has not: text.py makes it a call of this.
template <class V, class... A>
V vector(A...);
}  // namespace msl

// How the lanes of a simdgroup see one another's elements of cooperative tensors on CUDA: by shuffles.
#pragma once

#include "target/lanes.h"
#include "target/math.h"

#define MSL_CHECK_SLICE(begin, length, whole) ((void)0)

namespace msl {

METAL_FUNC float add_product(float a, float b, float sum) { return __fmaf_rn(a, b, sum); }
METAL_FUNC int32_t add_product(int32_t a, int32_t b, int32_t sum) { return a * b + sum; }

METAL_FUNC uint32_t index_of_simdgroup() { return index_of_thread() / kSimdWidth; }

// Parts of two matrices. All lanes of the simdgroup read elements together.
template <class A, class B>
struct Fragments {
  A a;
  B b;

  METAL_FUNC Fragments(const A& a, const B& b, uint32_t) : a(a), b(b) {}

  // Element `slot` of a lane's part. Between lanes, `slot` differs in the bits `varying` only.
  template <uint32_t varying>
  METAL_FUNC auto left(uint32_t lane, uint32_t slot) const {
    return element<varying>(a.elements, lane, slot);
  }
  template <uint32_t varying>
  METAL_FUNC auto right(uint32_t lane, uint32_t slot) const {
    return element<varying>(b.elements, lane, slot);
  }

 private:
  template <uint32_t varying, class T>
  static METAL_FUNC T element(const T* elements, uint32_t lane, uint32_t slot) {
    T result{};
#pragma unroll
    for (uint32_t bits = 0; bits < 8; ++bits) {
      if (bits & ~varying) continue;
      const T found = shuffle<kSimd>(kEveryLane, elements[(slot & ~varying) | bits], lane);
      if ((slot & varying) == bits) result = found;
    }
    return result;
  }
};

template <int>
METAL_FUNC void check_scope(uint32_t, uint64_t) {}
constexpr bool kCheckingTensors = false;
METAL_FUNC void report_unwritten(uint32_t, uint32_t) {}

}  // namespace msl

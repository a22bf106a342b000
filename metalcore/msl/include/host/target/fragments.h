// How the lanes of a simdgroup see one another's elements of cooperative tensors on the host, and what checking mode
// finds in operations on tensors.
#pragma once

#include "target/lanes.h"
#include "target/math.h"

namespace msl {

METAL_FUNC float add_product(float a, float b, float sum) { return math::multiply_add(a, b, sum); }
METAL_FUNC int32_t add_product(int32_t a, int32_t b, int32_t sum) { return a * b + sum; }

METAL_FUNC uint32_t index_of_simdgroup() { return self().simdgroup; }

// Parts of two matrices, which every lane has published.
template <class A, class B>
struct Fragments {
  struct Parts {
    A a;
    B b;
  };
  Lanes<Parts> lanes;

  METAL_FUNC Fragments(const A& a, const B& b, uint32_t line) : lanes(publish(Parts{a, b}, kSimd, line)) {}

  // Element `slot` of a lane's part. Between lanes, `slot` differs in the bits `varying` only.
  template <uint32_t varying>
  METAL_FUNC auto left(uint32_t lane, uint32_t slot) const {
    return part(lane).a.elements[slot];
  }
  template <uint32_t varying>
  METAL_FUNC auto right(uint32_t lane, uint32_t slot) const {
    return part(lane).b.elements[slot];
  }

 private:
  METAL_FUNC const Parts& part(uint32_t lane) const {
    const unsigned char* slots = lanes.exchange.values;
    return *reinterpret_cast<const Parts*>(slots + size_t(lane) * msl_abi::exchange_stride(sizeof(Parts)));
  }
};

}  // namespace msl

#if MSL_CHECKING
namespace msl::callbacks {

// These functions are not instrumented and not inlined, so that their return addresses are in the user's lines.
#define MSL_TENSOR_FINDING(name, kind)                                                                     \
  MSL_UNINSTRUMENTED __attribute__((MSL_CALLBACK_PLACE)) static void name(int64_t index, uint64_t count) { \
    const msl_abi::Finding finding = {msl_abi::Finding::kind, index, count, ""};                           \
    if (runtime) runtime->finding(&finding, __builtin_return_address(0));                                  \
  }
MSL_TENSOR_FINDING(slice_beyond, kSlice)
MSL_TENSOR_FINDING(element_unwritten, kUnwritten)
MSL_TENSOR_FINDING(scope_divided, kScope)
MSL_TENSOR_FINDING(operation_begins, kOperation)
#undef MSL_TENSOR_FINDING

}  // namespace msl::callbacks

#define MSL_CHECK_SLICE(begin, length, whole)                                                             \
  do {                                                                                                    \
    if ((begin) < 0 || (begin) > (whole) || (whole) - (begin) < (length))                                 \
      msl::callbacks::slice_beyond(int64_t((begin) < 0 ? (begin) : (begin) + (length)), uint64_t(whole)); \
  } while (false)
#else
#define MSL_CHECK_SLICE(begin, length, whole) ((void)0)
#endif

namespace msl {

// The threads of a scope of `simdgroups` (0: one thread) must come to an operation together, and to the same one, which
// the digest tells.
template <int simdgroups>
METAL_FUNC void check_scope(uint32_t line, uint64_t digest) {
#if MSL_CHECKING
  if constexpr (simdgroups > 0) {
    callbacks::operation_begins(simdgroups, digest);
    const msl_abi::Thread& thread = self();
    const uint32_t threads = thread.threadgroup_size.x * thread.threadgroup_size.y * thread.threadgroup_size.z;
    if (simdgroups > 1 && thread.simdgroups != uint32_t(simdgroups))
      callbacks::scope_divided(thread.simdgroups * int64_t(kSimdWidth), simdgroups * uint64_t(kSimdWidth));
    const uint32_t first = thread.simdgroup * kSimdWidth, there = threads - first < kSimdWidth ? threads - first : 32;
    const uint32_t active = publish(uint32_t(0), kSimd, line).exchange.active;
    if (there < kSimdWidth || active != ~0u) callbacks::scope_divided(__builtin_popcount(active), uint64_t(kSimdWidth));
    // A barrier that orders no memory is a finding where simdgroups come to different operations.
    if (simdgroups > 1) threadgroup_barrier(0, line);
  }
#endif
}

// Whether elements of cooperative tensors have been written. Only checking mode has a bit for each.
#if MSL_CHECKING
constexpr bool kCheckingTensors = true;
#else
constexpr bool kCheckingTensors = false;
#endif
METAL_FUNC void report_unwritten(uint32_t index, uint32_t count) {
#if MSL_CHECKING
  callbacks::element_unwritten(index, count);
#endif
}

}  // namespace msl

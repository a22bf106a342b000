// What a translated kernel asks of the executor: the running thread, barriers, exchanges between lanes, threadgroup
// memory. `line` is the line of the call in the user's source (see kernel_abi.h).
#pragma once

#include "host/kernel_abi.h"

// Every function of these headers is inlined into the kernel, so that debug information puts a memory access on the
// user's line and loops over threads can be vectorized.
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_LAMBDA __attribute__((always_inline))
#define METAL_CONST __attribute__((const))
#define METAL_PURE __attribute__((pure))
#define METAL_NOINLINE __attribute__((noinline))

namespace msl {

static const msl_abi::Runtime* runtime = nullptr;

METAL_FUNC const msl_abi::Thread& self() { return *runtime->self(); }

// A threadgroup variable of the running kernel; `site` numbers the declaration (given by the translator).
template <class T>
METAL_FUNC T& threadgroup_variable(uint32_t site) {
  return *static_cast<T*>(runtime->threadgroup_memory(site, sizeof(T), alignof(T)));
}

}  // namespace msl

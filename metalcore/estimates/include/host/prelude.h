// The prelude of programs that count. The headers beside this one come before the simulator's, which they include. Of
// some of those the functions stand for one instruction of a GPU each: they stay calls, which instrument.py counts.
#pragma once

#include "target/formats.h"
#include "target/matrix_product.h"

#include_next "host/prelude.h"

// What instrument.py calls, also before the library is bound. The executor tells these events by their kind
// (csrc/backends/simulator/counted.h).
extern "C" {
__attribute__((used, noinline, visibility("hidden"))) void msl_count_block(uint32_t block) {
  if (msl::runtime) msl::runtime->access(nullptr, block, 16, nullptr);
}
__attribute__((used, noinline, visibility("hidden"))) void msl_count_access(const void* address, uint32_t size,
                                                                            uint32_t kind, uint32_t site) {
  if (msl::runtime) msl::runtime->access(address, size, kind, reinterpret_cast<const void*>(uintptr_t{site}));
}
}

// 2 tells the executor that the library counts.
#undef MSL_LIBRARY
#define MSL_LIBRARY(kernels, count)                                                                 \
  extern "C" __attribute__((visibility("default"))) const msl_abi::Library* msl_library() {         \
    static const msl_abi::Library library = {                                                       \
        msl_abi::kVersion, count, kernels, [](const msl_abi::Runtime* r) { msl::runtime = r; }, 2, nullptr, nullptr}; \
    return &library;                                                                                \
  }

#include "runtime.h"

#include "threadgroup.h"

namespace metalcore::simulator {
namespace {

const msl_abi::Runtime runtime = {
    .version = msl_abi::kVersion,
    .self = [] { return static_cast<const msl_abi::Thread*>(&Threadgroup::current()->thread); },
    .threadgroup_barrier = [](uint32_t, uint32_t line) { Threadgroup::barrier(line); },
    .simdgroup_barrier = [](uint32_t, uint32_t line) { Threadgroup::simdgroup_barrier(line); },
    .simd_exchange = &Threadgroup::exchange,
    .threadgroup_memory =
        [](uint32_t site, uint32_t bytes, uint32_t alignment) {
          return Threadgroup::current()->group->memory(site, bytes, alignment);
        },
    .yield = &Threadgroup::yield,
    .space = &Threadgroup::space,
    .access = nullptr,
    .finding = nullptr,
};

}  // namespace

const msl_abi::Runtime* normal_runtime() { return &runtime; }

}  // namespace metalcore::simulator

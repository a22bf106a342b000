// Barriers, fences, and the names of memory flags, orders and scopes.
#pragma once

#include "metal/values.h"

namespace metal {

enum class mem_flags : uint32_t {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint32_t(a) | uint32_t(b)); }
METAL_FUNC constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint32_t(a) & uint32_t(b)); }

enum memory_order {
  memory_order_relaxed = 0,
  memory_order_acquire = 2,
  memory_order_release = 3,
  memory_order_acq_rel = 4,
  memory_order_seq_cst = 5,
};

enum thread_scope : int {  // int has room for the value below
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};

// A value newer than Metal 3.1. A using-directive finds it, so a program may still declare it itself, as MLX does.
namespace newer {
constexpr thread_scope thread_scope_system = thread_scope(thread_scope_device + 1);
}
using namespace newer;

METAL_FUNC void threadgroup_barrier(mem_flags flags, uint32_t line = __builtin_LINE()) {
  msl::threadgroup_barrier(uint32_t(flags), line);
}
METAL_FUNC void threadgroup_barrier(mem_flags flags, thread_scope, uint32_t line = __builtin_LINE()) {
  msl::threadgroup_barrier(uint32_t(flags), line);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, uint32_t line = __builtin_LINE()) {
  msl::simdgroup_barrier(uint32_t(flags), line);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, thread_scope, uint32_t line = __builtin_LINE()) {
  msl::simdgroup_barrier(uint32_t(flags), line);
}

// Every order gives a full fence: the flags and the order may be run-time values here.
METAL_FUNC void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  msl::memory_fence();
}

}  // namespace metal

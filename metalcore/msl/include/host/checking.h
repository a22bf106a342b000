// Checking libraries are compiled with -fsanitize=thread and not linked to libtsan. The compiler inserts a callback
// before every load and store; these callbacks are defined here, and tell the executor the address and the program
// counter. Atomic builtins become __tsan_atomic* calls, which also do the operation itself. Some checks of
// -fsanitize=undefined are used as well.
#pragma once

#include "target/runtime.h"

// Clang instruments atomics unless all instrumentation is switched off.
#ifdef __clang__
#define MSL_UNINSTRUMENTED \
  __attribute__((no_sanitize("thread"), no_sanitize("undefined"), disable_sanitizer_instrumentation))
#else
#define MSL_UNINSTRUMENTED __attribute__((no_sanitize("thread"), no_sanitize("undefined")))
#endif

#if MSL_CHECKING

namespace msl::callbacks {

// A callback is not instrumented, and never inlined, so that its return address is that of the access. An assembler
// label names it, because the compiler has its own C types for these functions. A section of their own tells the
// executor which addresses have no line of the user's source (MSL_LIBRARY).
#define MSL_CALLBACK_PLACE noinline, section("msl_callbacks")
#define MSL_CALLBACK(result, name, arguments)                                                        \
  MSL_UNINSTRUMENTED __attribute__((MSL_CALLBACK_PLACE, used, visibility("hidden"))) result name     \
      arguments __asm__("__tsan_" #name);                                                            \
  result name arguments
#define MSL_REPORT(size, kind) \
  if (runtime) runtime->access((const void*)p, size, kind, __builtin_return_address(0))

#define MSL_ACCESS(prefix, size, aligned)                                                                         \
  MSL_CALLBACK(void, prefix##read##size, (volatile void* p)) { MSL_REPORT(size, msl_abi::kRead | aligned); }      \
  MSL_CALLBACK(void, prefix##write##size, (volatile void* p)) { MSL_REPORT(size, msl_abi::kWrite | aligned); }
#define MSL_ACCESSES(size)                      \
  MSL_ACCESS(, size, msl_abi::kAligned)         \
  MSL_ACCESS(unaligned_, size, 0)               \
  MSL_ACCESS(volatile_, size, msl_abi::kAligned) \
  MSL_ACCESS(unaligned_volatile_, size, 0)
MSL_ACCESSES(1)
MSL_ACCESSES(2)
MSL_ACCESSES(4)
MSL_ACCESSES(8)
MSL_ACCESSES(16)
#undef MSL_ACCESSES
#undef MSL_ACCESS

MSL_CALLBACK(void, read_range, (volatile void* p, size_t size)) { MSL_REPORT(uint32_t(size), msl_abi::kRead); }
MSL_CALLBACK(void, write_range, (volatile void* p, size_t size)) { MSL_REPORT(uint32_t(size), msl_abi::kWrite); }
// Clang calls these in place of memcpy and the like.
#define MSL_REPORT_RANGE(address, size, kind) \
  if (runtime && size) runtime->access(address, uint32_t(size), kind, __builtin_return_address(0))
MSL_CALLBACK(void*, memset, (void* to, int value, size_t size)) {
  MSL_REPORT_RANGE(to, size, msl_abi::kWrite);
  return __builtin_memset(to, value, size);
}
MSL_CALLBACK(void*, memcpy, (void* to, const void* from, size_t size)) {
  MSL_REPORT_RANGE(from, size, msl_abi::kRead);
  MSL_REPORT_RANGE(to, size, msl_abi::kWrite);
  return __builtin_memcpy(to, from, size);
}
MSL_CALLBACK(void*, memmove, (void* to, const void* from, size_t size)) {
  MSL_REPORT_RANGE(from, size, msl_abi::kRead);
  MSL_REPORT_RANGE(to, size, msl_abi::kWrite);
  return __builtin_memmove(to, from, size);
}
#undef MSL_REPORT_RANGE
MSL_CALLBACK(void, vptr_read, (void*)) {}
MSL_CALLBACK(void, vptr_update, (void*, void*)) {}
MSL_CALLBACK(void, func_entry, (void*)) {}
MSL_CALLBACK(void, func_exit, (void*)) {}
MSL_CALLBACK(void, init, ()) {}
MSL_CALLBACK(void, atomic_thread_fence, (int)) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
MSL_CALLBACK(void, atomic_signal_fence, (int)) {}

#define MSL_FETCH(bits, op)                                                                          \
  MSL_CALLBACK(uint##bits##_t, atomic##bits##_fetch_##op,                                            \
               (volatile uint##bits##_t * p, uint##bits##_t value, int)) {                           \
    MSL_REPORT(bits / 8, msl_abi::kAtomic | msl_abi::kAligned); \
    return __atomic_fetch_##op(p, value, __ATOMIC_SEQ_CST);                                          \
  }
#define MSL_ATOMIC(bits)                                                                             \
  MSL_CALLBACK(uint##bits##_t, atomic##bits##_load, (const volatile uint##bits##_t* p, int)) {       \
    MSL_REPORT(bits / 8, msl_abi::kAtomicRead | msl_abi::kAligned); \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                                  \
  MSL_CALLBACK(void, atomic##bits##_store, (volatile uint##bits##_t * p, uint##bits##_t value, int)) { \
    MSL_REPORT(bits / 8, msl_abi::kAtomicWrite | msl_abi::kAligned); \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                    \
  }                                                                                                  \
  MSL_CALLBACK(uint##bits##_t, atomic##bits##_exchange,                                              \
               (volatile uint##bits##_t * p, uint##bits##_t value, int)) {                           \
    MSL_REPORT(bits / 8, msl_abi::kAtomic | msl_abi::kAligned); \
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                          \
  }                                                                                                  \
  MSL_CALLBACK(bool, atomic##bits##_compare_exchange_strong,                                         \
               (volatile uint##bits##_t * p, uint##bits##_t * expected, uint##bits##_t value, int, int)) { \
    MSL_REPORT(bits / 8, msl_abi::kAtomic | msl_abi::kAligned); \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                  \
  MSL_CALLBACK(bool, atomic##bits##_compare_exchange_weak,                                           \
               (volatile uint##bits##_t * p, uint##bits##_t * expected, uint##bits##_t value, int, int)) { \
    MSL_REPORT(bits / 8, msl_abi::kAtomic | msl_abi::kAligned); \
    return __atomic_compare_exchange_n(p, expected, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                  \
  MSL_CALLBACK(uint##bits##_t, atomic##bits##_compare_exchange_val,                                  \
               (volatile uint##bits##_t * p, uint##bits##_t expected, uint##bits##_t value, int, int)) { \
    MSL_REPORT(bits / 8, msl_abi::kAtomic | msl_abi::kAligned); \
    __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);     \
    return expected;                                                                                 \
  }                                                                                                  \
  MSL_FETCH(bits, add) MSL_FETCH(bits, sub) MSL_FETCH(bits, and) MSL_FETCH(bits, or) MSL_FETCH(bits, xor)
MSL_ATOMIC(8)
MSL_ATOMIC(16)
MSL_ATOMIC(32)
MSL_ATOMIC(64)
#undef MSL_ATOMIC
#undef MSL_FETCH
#undef MSL_REPORT
#undef MSL_CALLBACK

// The functions that failing checks of -fsanitize=undefined call, in place of libubsan's. They tell the executor, which
// ends the dispatch or lets it go on.

// The compilers' layouts of what they pass.
struct Place {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, information;  // an integer's information: the logarithm of its bits, then whether it is signed
  char name[1];
};
struct IndexData {
  Place place;
  const Type *array, *index;
};
struct PointerData {
  Place place;
  const Type* type;
  uint8_t log_alignment, use;  // use: 0 is a load, 1 a store, others a reference and the like
};

#define MSL_HANDLER(name, arguments)                                                               \
  MSL_UNINSTRUMENTED __attribute__((MSL_CALLBACK_PLACE, used, visibility("hidden"))) void name     \
      arguments __asm__("__ubsan_handle_" #name);                                                  \
  void name arguments
#define MSL_FIND(kind, index, count, type)                                           \
  do {                                                                               \
    const msl_abi::Finding finding = {msl_abi::Finding::kind, index, count, type};   \
    if (runtime) runtime->finding(&finding, __builtin_return_address(0));            \
  } while (false)

MSL_HANDLER(out_of_bounds, (const IndexData* data, uintptr_t index)) {
  const uint32_t bits = 1u << (data->index->information >> 1);
  int64_t value = int64_t(index);
  if (data->index->information & 1 && bits < 64) value = int64_t(uint64_t(value) << (64 - bits)) >> (64 - bits);
  // The name is the array type's: 'float [8]', or 'float [4][8]' for four of those.
  uint64_t count = 0;
  for (const char* at = __builtin_strchr(data->array->name, '['); at && *++at >= '0' && *at <= '9';)
    count = count * 10 + uint64_t(*at - '0');
  MSL_FIND(kIndex, value, count, data->array->name);
}
MSL_HANDLER(type_mismatch_v1, (const PointerData* data, uintptr_t address)) {
  if (!address) return;  // no variable: the check of the access says more
  if (data->use == 1)
    MSL_FIND(kWriteBeyond, 0, 0, data->type->name);
  else
    MSL_FIND(kReadBeyond, 0, 0, data->type->name);
}
MSL_HANDLER(divrem_overflow, (const void*, uintptr_t, uintptr_t)) { MSL_FIND(kDivision, 0, 0, ""); }
MSL_HANDLER(builtin_unreachable, (const void*)) {
  MSL_FIND(kUnreachable, 0, 0, "");
  __builtin_trap();
}
MSL_HANDLER(missing_return, (const void*)) {
  MSL_FIND(kNoReturn, 0, 0, "");
  __builtin_trap();
}

// Reports an index of a vector or a matrix, which is no array for compilers.
MSL_UNINSTRUMENTED __attribute__((MSL_CALLBACK_PLACE)) static void index_beyond(size_t index, size_t count) {
  MSL_FIND(kIndex, int64_t(index), count, "");
}
METAL_FUNC constexpr void check_index(size_t index, size_t count) {
  if (!__builtin_is_constant_evaluated() && index >= count) index_beyond(index, count);
}
#undef MSL_HANDLER

}  // namespace msl::callbacks

#endif

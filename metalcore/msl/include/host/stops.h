// Functions that end a program, which a kernel calls by a builtin, or because the compiler inserts the call. Here they
// end the dispatch.
#pragma once

namespace msl::stops {

#if MSL_CHECKING
#define MSL_STOP_IS_FOUND MSL_FIND(kStop, 0, 0, "")
#else
#define MSL_STOP_IS_FOUND
#endif
#define MSL_STOP(name)                                                                                              \
  MSL_UNINSTRUMENTED __attribute__((noreturn, noinline, used, visibility("hidden"))) void name() __asm__(#name);     \
  void name() {                                                                                                     \
    MSL_STOP_IS_FOUND;                                                                                              \
    __builtin_trap();                                                                                               \
  }
MSL_STOP(abort)
MSL_STOP(exit)
MSL_STOP(_exit)
MSL_STOP(_Exit)
MSL_STOP(quick_exit)
MSL_STOP(pthread_exit)
MSL_STOP(__assert_fail)
MSL_STOP(__stack_chk_fail)  // some distributions' compilers guard against private arrays that run over
#undef MSL_STOP
#undef MSL_STOP_IS_FOUND
#undef MSL_FIND

}  // namespace msl::stops

// Loops that a program asks to be unrolled are, as a GPU's compiler does.
#pragma once

#include_next "target/runtime.h"

#undef MSL_UNROLL
#undef MSL_UNROLL_BY
#define MSL_PRAGMA(text) _Pragma(#text)
#define MSL_UNROLL _Pragma("unroll")
#define MSL_UNROLL_BY(count) MSL_PRAGMA(unroll count)

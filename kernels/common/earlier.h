// On NVIDIA GPUs a kernel begins while those before it run. A program that calls metalcore_await_earlier_kernels(0) has
// all its kernels call it in every thread, before they touch device memory: what they compute before that costs no
// time. They also call metalcore_begin_later_kernels(0) where little is left to do: a kernel that begins before takes
// registers from threadgroups that are still to come. Elsewhere a kernel begins when those before it have ended.
// NVIDIA's headers have the same functions for an int in the place of the long.
#pragma once

#include <metal_stdlib>

METAL_FUNC void metalcore_await_earlier_kernels(long) {}
METAL_FUNC void metalcore_begin_later_kernels(long) {}

// The same, but compilers do not put off the computation of the addresses.
template <typename T, uint kCount>
METAL_FUNC void metalcore_await_earlier_kernels(thread device T* const (&)[kCount], long) {}

// What NVIDIA GPUs can do early. Their headers have the same functions for an int in the place of the long, which is
// what kernels call them with; elsewhere they do nothing.
#pragma once

#include <metal_stdlib>

// Asks for the memory at an address to come into the core's cache, which takes no register.
template <typename T>
METAL_FUNC void metalcore_prefetch(device const T*, long) {}

// A kernel begins while those before it run. A program that calls this function has all its kernels call it in every
// thread, before they touch device memory: what they compute before that costs no time.
METAL_FUNC void metalcore_await_earlier_kernels(long) {}

// The same, but compilers do not put off the computation of the addresses.
template <typename T, uint kCount>
METAL_FUNC void metalcore_await_earlier_kernels(thread device T* const (&)[kCount], long) {}

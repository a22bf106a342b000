// A translated program includes this header on CUDA, inside a namespace (see cuda_source.py): it has all of
// <metal_stdlib>, and the glue that makes functions kernels. NVRTC needs this directory's parent and this directory as
// include paths, and --device-as-default-execution-space, since MSL's functions have no annotation. MSL_CONVERGENT
// promises that whole simdgroups call the simd functions, and name only lanes that exist.
#pragma once

#include "cuda/builtins.h"
#include "metal/stdlib.h"

#include "cuda/entry.h"
#include "cuda/unaligned.h"
#include "target/tile_products.h"

// Words of C++20, which NVRTC compiles. In MSL they are free names.
#define char8_t msl_char8_t
#define concept msl_concept
#define consteval msl_consteval
#define constinit msl_constinit
#define co_await msl_co_await
#define co_return msl_co_return
#define co_yield msl_co_yield
#define requires msl_requires

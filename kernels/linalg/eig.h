// Arguments of the kernels of eig, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Matrices in a threadgroup of the kernels that give a simdgroup to each.
#define EIG_SIMDGROUPS 4
#define EIG_COMPLEX_SIMDGROUPS 2
// The largest matrix in threadgroup memory, and the threads that share one.
#define EIG_BLOCK 64
#define EIG_COMPLEX_BLOCK 60
#define EIG_BLOCK_THREADS 64
#define EIG_DEVICE 1024         // the largest matrix in device memory
#define EIG_DEVICE_THREADS 256  // that share such a matrix

// eig.metal and eig_complex.metal. Results are contiguous.
struct EigParams {
  int64_t batch_stride, row_stride, column_stride;  // A's
  uint32_t matrices, size;
};

// schur.metal and schur_complex.metal. Without sweeps the result is the Hessenberg form.
struct SchurParams {
  EigParams eig;
  uint32_t sweeps;
};

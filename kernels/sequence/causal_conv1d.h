// What the kernels of causal_conv1d and csrc/ops/sequence/causal_conv1d.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Of a threadgroup: channels, positions and threads. A window has up to CONV1D_WIDTH positions.
#define CONV1D_CHANNELS 32
#define CONV1D_POSITIONS 64
#define CONV1D_THREADS 256
#define CONV1D_WIDTH 8

// Kernels of vectors: the longest window; where channels are neighbours in memory, a thread's channels, and of the
// derivative their bytes and the threads of a threadgroup; where positions are, the vectors of a thread.
#define CONV1D_NARROW 4
#define CONV1D_ACROSS 4
#define CONV1D_BACK_BYTES 8
#define CONV1D_BACK_THREADS 128
#define CONV1D_VECTORS 4

// How sequences lie in a batch entry: one, or as many as cu_seqlens ends, or neighbours with one number of seq_idx.
#define CONV1D_WHOLE 0
#define CONV1D_ENDS 1
#define CONV1D_NUMBERS 2

// Strides are in elements, of batch, channel and position; the state's are of sequence, channel and position. The
// weight, (channels, width), the bias, seq_idx, cu_seqlens and a derivative by the state are contiguous.
struct CausalConv1dParams {
  uint32_t channels;
  uint32_t length;
  uint32_t width;
  uint32_t segments;  // threadgroups along the positions
  uint32_t tiles;     // … and of each, the parts of CONV1D_POSITIONS
  uint32_t run;       // positions of a thread's or simdgroup's walk (kernels of vectors), of which there are `segments`
  uint32_t sequencing;
  uint32_t sequences;  // that cu_seqlens ends
  uint32_t wide;       // weight and bias are float32
  uint32_t has_bias;
  uint32_t has_state;
  uint32_t silu;
  uint32_t parameters_wanted;  // backward
  int64_t x[3];
  int64_t grad[3];
  int64_t out[3];  // y, or the gradient of x
  int64_t state[3];
};

struct CausalConv1dUpdateParams {
  uint32_t channels;
  uint32_t length;  // new positions
  uint32_t width;
  uint32_t states;        // rows of the state
  uint32_t state_length;  // positions that it keeps
  uint32_t is_ring;       // position p is at p modulo state_length
  uint32_t has_rows;      // indices say which row of the state belongs to a batch entry
  uint32_t wide;
  uint32_t has_bias;
  uint32_t silu;
  int64_t x[3];
  int64_t out[3];
  int64_t state[3];
};

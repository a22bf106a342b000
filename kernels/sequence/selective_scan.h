// What the kernels of selective_scan and its step share with csrc/ops/sequence/selective_scan.cpp.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define SCAN_THREADS 128     // of a threadgroup
#define SCAN_POSITIONS 64    // each walk along positions has a multiple of so many
#define SCAN_STATES 128      // the most states of a channel
#define SCAN_CARRY_CHUNKS 8  // whose numbers a thread of the carry reads at once

#define SCAN_LANE_CHANNELS 4  // channels of a lane, forward, where states share a rate

// Lanes that share a channel of so many states, and the channels of a threadgroup whose lanes have one.
#define SCAN_LANES(states) ((states) <= 16 ? 4 : (states) <= 64 ? 16 : 32)
#define SCAN_CHANNELS(states) (SCAN_THREADS / SCAN_LANES(states))
// Lanes of selective_state_update that share a channel of up to `size` states in vectors of 16 bytes, where a state has
// `bytes`, and channels of a lane.
#define UPDATE_LANES(size, bytes) ((size) * (bytes) / 16)
#define UPDATE_ROWS(lanes, shared) ((lanes) < 4 ? (lanes) : (lanes) < 16 || !(shared) ? 4 : 8)

// Strides are in elements: of batch, position, head and channel of a head; of batch, position, group and state (B, C);
// of head, channel and state (A). D, the bias and the states, (batch, head, channel, state), are contiguous.
struct SelectiveScanParams {
  uint32_t batch;
  uint32_t length;
  uint32_t dim;       // channels of a head
  uint32_t channels;  // of all heads
  uint32_t groups;    // of neighbouring channels, which have their own B and C
  uint32_t states;
  uint32_t blocks;  // threadgroups that share a group's channels
  uint32_t tiles;   // parts of a threadgroup's channels, one after the other (derivative)
  uint32_t chunk;   // positions of a walk
  uint32_t chunks;
  uint32_t wide_steps;  // dt is float32
  uint32_t softplus;
  uint32_t has_skip;  // D
  uint32_t has_gate;  // z
  uint32_t has_bias;
  uint32_t has_before;  // states
  uint32_t has_after;   // states are wanted, or gradients of them are given
  uint32_t has_numbers;
  uint32_t for_derivative;
  float low;
  float high;
  int64_t x[4];
  int64_t step[4];
  int64_t gate[4];
  int64_t grad[4];
  int64_t out[4];
  int64_t A[3];
  int64_t B[4];
  int64_t C[4];
};

// Strides: of batch, head and channel; of batch, group and state (B, C); of head, channel and state (A); of head and
// channel (D, bias); of row, head, channel and state (the state).
struct SelectiveStateUpdateParams {
  uint32_t batch;
  uint32_t heads;
  uint32_t dim;
  uint32_t group_heads;  // that share B and C
  uint32_t states;
  uint32_t rows;     // of the state
  uint32_t entries;  // of the batch, that a threadgroup walks over
  uint32_t has_rows;
  uint32_t wide_steps;  // dt, D and the bias are float32
  uint32_t wide_skip;
  uint32_t wide_bias;
  uint32_t softplus;
  uint32_t has_skip;
  uint32_t has_gate;
  uint32_t has_bias;
  int64_t state[4];
  int64_t x[3];
  int64_t step[3];
  int64_t gate[3];
  int64_t A[3];
  int64_t B[3];
  int64_t C[3];
  int64_t skip[2];
  int64_t bias[2];
};

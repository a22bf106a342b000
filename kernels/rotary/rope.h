// What rope.metal and csrc/ops/rotary/rope.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Heads that a thread rotates by the same angles.
#define ROPE_HEADS 4

// Strides are in elements. Those of q and k, and of their results, are of batch, token and head.
struct RopeParams {
  uint32_t tokens;  // of a batch entry
  uint32_t q_heads;
  uint32_t heads;        // of q and k together
  uint32_t pairs;        // elements that are rotated, by twos
  uint32_t rest;         // elements behind them that are copied
  uint32_t interleaved;  // pairs are neighbours, and not `pairs` elements apart
  uint32_t every_other;  // … and the tables have each angle twice, side by side
  uint32_t sections[2];  // the first pairs of the second and of the third section
  uint32_t sectioned;
  uint32_t has_positions;
  uint32_t positions;  // rows of the tables, if positions choose them
  float direction;     // 1, or -1 to rotate back
  int64_t q_strides[3];
  int64_t k_strides[3];
  int64_t q_out_strides[3];
  int64_t k_out_strides[3];
  int64_t table_strides[3];     // of section, batch and token, or position
  int64_t position_strides[3];  // of section, batch and token
};

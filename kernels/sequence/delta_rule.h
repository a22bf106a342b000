// What the kernels of gated_delta_rule and csrc/ops/sequence/delta_rule.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define DELTA_THREADS 128  // of a threadgroup
// What kernels that walk along chunks promise: as many threads as 128 registers each leave on Apple's GPUs, and 168 on
// NVIDIA's, whose compiler takes more without a bound, so that fewer threadgroups run at once.
#define DELTA_PROMISE 384
// The same for inverses. Those that leave three bfloats an element run on Hopper GPUs, whose cores have registers for
// five threadgroups of DELTA_THREADS then.
#define DELTA_INVERSE_PROMISE(parts) ((parts) ? 640 : DELTA_THREADS)
// The same for linear_scan_keys with bfloats, for which 80 registers are enough: NVIDIA's cores run five threadgroups.
#define DELTA_BFLOAT_PROMISE 640
#define DELTA_STEPS 8    // positions whose keys and queries are in threadgroup memory at once
#define DELTA_CHUNK 64   // positions between the states that the derivative keeps
#define DELTA_FACTORS 8  // rows of a chunk's positions that gated_delta_rule_inverse leaves
#define DELTA_SIZE 256   // the largest size of a head
// Kernels by units: threads, columns of a state that these have, and elements of a triangular matrix as three parts.
#define DELTA_UNIT_THREADS 256
#define DELTA_UNIT_COLUMNS 32
#define DELTA_UNIT_PARTS (3 * DELTA_CHUNK * DELTA_CHUNK)
// Positions of a step of linear_scan.h, and keys and values of its states.
#define DELTA_SCAN_STEP 32
#define DELTA_SCAN_KEYS 128
#define DELTA_SCAN_VALUES 64
// Rows of a state that a simdgroup of gated_delta_rule_rows has, for the size that its values are padded to.
#define DELTA_ROWS(values) ((values) > 128 ? 4 : 8)

// A sequence's chunks have neighbouring places among the kept states. The places of sequence n begin at n * places. If
// cu_seqlens divides the positions, they begin at cu_seqlens[n] / DELTA_CHUNK + n.
//
// Strides are in elements, of batch, position and head. All other tensors are contiguous: g, beta (batch, position,
// value head), g by channel (batch, position, value head, key), states (sequence or chunk, value head, key, value).
struct DeltaRuleParams {
  uint32_t batch;
  uint32_t length;
  uint32_t heads;  // of q and k, each for value_heads / heads neighbouring ones of v
  uint32_t value_heads;
  uint32_t keys;    // the size of q's and k's heads
  uint32_t values;  // the size of v's heads
  uint32_t sequences;
  uint32_t places;
  uint32_t packed;  // cu_seqlens divides the positions of one batch entry
  uint32_t normalized;
  uint32_t has_gate;
  uint32_t by_channel;  // g has a number for each key of a position's head
  uint32_t weighted;    // there is a beta
  uint32_t corrects;    // the state learns the difference of v and what it gives for k
  uint32_t has_skip;    // (value head, value), by which v adds to the results
  uint32_t has_state;
  uint32_t has_state_grad;  // of the final state
  uint32_t for_derivative;  // the forward pass writes what the derivative needs in the place of results
  uint32_t row_blocks;      // threadgroups that share the rows of a state
  uint32_t segments;        // parts of a sequence that threadgroups walk along
  uint32_t shares;          // threadgroups that share the value heads of a head of q and k
  uint32_t wide;            // all rows of q, k and grad are whole vectors of 16 bytes
  float scale;
  int64_t q[3];
  int64_t k[3];
  int64_t v[3];
  int64_t grad[3];
};

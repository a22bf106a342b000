// What gated_delta_rule's kernel for one position and csrc/ops/sequence/delta_rule.cpp share.
#pragma once

// Threads that share a row of a state, with four columns each, and rows that a thread has. All threads of a threadgroup
// have as many rows as the keys are padded to.
#define DELTA_STEP_LANES(keys) (DELTA_STEP_ROWS * DELTA_THREADS / (keys))
#define DELTA_STEP_ROWS 8

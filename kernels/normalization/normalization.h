// Arguments of the kernels of normalizations, shared with the host.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Innermost first, in elements. Rows lie strides[0] apart where sizes[0] is 0.
struct RowStrides {
  uint32_t sizes[2];
  int64_t strides[3];
};

struct LayerNormParams {
  uint32_t length;  // of a row
  uint32_t rows;
  float eps;
  float inverse_length;  // backward: 1 / length
  uint32_t has_weight;
  uint32_t has_bias;
  uint32_t has_residual;  // forward: add `residual` to x first; backward: add `residual`'s gradient at the end
  uint32_t statistics;    // forward: write means and scales
  uint32_t streams;       // backward, simd and block: how many simdgroups or threadgroups share the rows
  uint32_t partial;       // … and whether they sum up their rows' parts of the parameters' gradients
  uint32_t chunk_rows;    // backward, other variants: the rows of a part of these gradients
  uint32_t aligned;       // … whether rows begin and end at multiples of 16 bytes
  RowStrides x;           // outputs are contiguous
  RowStrides residual;
  RowStrides grad;
};

struct RmsNormParams {
  uint32_t length;  // of a row
  uint32_t rows;
  float eps;
  float offset;  // what is added to the weight, of which there is one then
  uint32_t has_weight;
  uint32_t has_residual;  // forward: add `residual` to x first; backward: add `residual`'s gradient at the end
  uint32_t streams;       // backward, simd and block: how many simdgroups or threadgroups share the rows
  uint32_t partial;       // … and whether they sum up their rows' parts of the weight's gradient
  uint32_t splits;        // split: threadgroups that share a row
  uint32_t share;         // … the elements that each of them has
  uint32_t chunk_rows;    // … and the rows of which it has them; backward, thread: the rows of a partial sum
  uint32_t aligned;       // backward, thread: whether rows begin and end at multiples of 16 bytes
  uint32_t whole;         // … backward: all rows, so that it makes the weight's gradient and no part of it
  uint32_t with_scales;   // forward: leave the rows' scales in memory; backward: they are given
  RowStrides x;           // outputs are contiguous; the split kernels have one stride
  RowStrides residual;
  RowStrides grad;
};

// Rows of `groups` groups, each of which is normalized by itself.
struct RmsNormGatedParams {
  uint32_t length;  // of a group
  uint32_t groups;
  uint32_t rows;
  float eps;
  uint32_t has_weight;
  uint32_t gate_first;  // whether the gate's activation multiplies what is normalized, or else the result
  uint32_t silu;        // whether that is gate * sigmoid(gate), or else sigmoid(gate)
  uint32_t chunk_rows;  // backward: the rows of a part of the weight's gradient
  RowStrides x;         // outputs are contiguous
  RowStrides gate;
  RowStrides grad;
};

// Rows, of elements of so many bytes, that a threadgroup of rms_norm_backward_block1 has at work at once.
#define RMS_NORM_BLOCK1_ROWS(size) ((size) == 2 ? 2 : 1)

// The split variant. Rows, of elements of so many bytes, that a threadgroup has at work at once: as many as bring 128
// bytes to each thread, or half as many where each element takes an address of its own.
#define RMS_NORM_SPLIT_ROWS(aligned, size) (((aligned) ? 16 : 8) / (size))
#define RMS_NORM_BACKWARD_SPLIT_ROWS(aligned, size) (((aligned) ? 8 : 4) / (size))
// Rows that it has at most.
#define RMS_NORM_CHUNK_ROWS 64

// A group is a row: `channels` channels of `area` elements each, all of them contiguous.
struct GroupNormParams {
  uint32_t groups;  // of a batch entry
  uint32_t channels;
  uint32_t area;
  float eps;
  uint32_t has_weight;
  uint32_t has_bias;
  uint32_t segments;  // backward: the parts of a channel, each the work of a simdgroup
  uint32_t segment;   // … and the elements of each
};

// The parameters' gradients: sums over the batch and over segments.
struct GroupNormWeightParams {
  uint32_t batch;
  uint32_t channels;  // of all groups
  uint32_t segments;
};

// The sums of columns that the gradients of parameters are, over rows of partial sums.
struct ColumnSumsParams {
  uint32_t columns;  // of all results
  uint32_t first;    // those of the first result
  uint32_t chunks;   // rows
};

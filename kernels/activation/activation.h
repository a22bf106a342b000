// Arguments of the kernels of activation, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// softmax.metal and softmax_backward.metal.
struct SoftmaxParams {
  uint32_t length;  // of a row
  uint32_t rows;
  uint32_t inner;     // distance of a row's elements; 1 except in the columns variant
  uint32_t aligned;   // rows (columns: their neighbours) begin and end at multiples of 16 bytes
  uint32_t start;     // elements by which the first row of the input (backward: of all tensors) begins past one
  uint32_t together;  // forward: each row of the output begins as far past one, in elements, as the input's
  uint32_t splits;    // threadgroups that share a row, in the split variant
  uint32_t share;     // elements that each of them has
  float scale;        // forward: of the input's elements
  int64_t x_stride;   // from row to row (columns: from one block of `inner` rows to the next) in the forward kernels'
                      // input; everything else is contiguous
};

// activation.metal, with a gate. Strides are from row to row. The elements of a row are neighbours.
struct GatedParams {
  uint32_t length;
  int64_t gate_stride;
  int64_t up_stride;
  int64_t y_stride;          // forward: of the result; backward: of its gradient
  int64_t gate_grad_stride;  // backward
  int64_t up_grad_stride;
};

// activation.metal, with a bias. Strides are from row to row. The elements of a row are neighbours, and results are
// contiguous.
struct BiasedParams {
  uint32_t length;
  uint32_t rows;
  uint32_t chunk_rows;  // backward: the rows of a thread
  int64_t x_stride;
  int64_t grad_stride;
};

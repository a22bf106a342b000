// What the host sides of norms over rows share.
#pragma once

#include "../../../kernels/common/row_strides.h"
#include "../common/rows.h"

#include <initializer_list>
#include <optional>

namespace metalcore {

struct NormShape {
  int64_t rows;
  int64_t length;
};

// The last `dims` dimensions are normalized together.
NormShape norm_shape(const char* op, Sizes sizes, int64_t dims);

// Checks that a tensor has the device, the dtype and the shape of another one.
void check_like(const char* op, const char* argument, const Tensor& tensor, const Tensor& as);

// Memory for a float32 number of each row: of x's sizes, with ones for the last `dims`.
Tensor new_statistics(const Tensor& x, int64_t dims);

// A tensor as rows of its last dimensions. A row is contiguous.
struct NestedRows {
  Tensor tensor;
  RowStrides strides;
};
// The tensor itself if three strides say where its rows begin, or a contiguous copy.
NestedRows nested_rows_of(const Tensor& tensor, int64_t length);
// The same, except that one stride must do.
NestedRows flat_rows_of(const Tensor& tensor, int64_t length);

// Whether all rows, and the parameters that there are, begin and end at multiples of 16 bytes.
bool all_aligned16(std::initializer_list<const NestedRows*> rows, std::initializer_list<const MaybeTensor*> parameters,
                   int64_t length);

struct NormTuning {
  const char* family;
  // Whether rows are kept in the registers of few threads, and longer ones walked twice: threads of the other kernels,
  // of which there are up to 1024, hold more than the 52 registers that an Apple GPU has for each of so many.
  bool few_registers = false;
};
extern const gpu::Table<NormTuning> norm_tuning;

// The derivative of a norm. There are as many partial sums of the parameters' gradients as teams of threads that keep
// one in registers. Where there are no such teams, a separate kernel makes one for each chunk of rows.
struct NormBackwardPlan {
  RowPlan rows;
  RowKernels kernels;
  int64_t chunk_rows;  // 1 where teams keep the sums
  int64_t chunks;
  bool separate() const { return chunk_rows > 1; }
  // A tensor's rows for these kernels. Those of the block variants take one stride.
  NestedRows rows_of(const Tensor& tensor, int64_t length) const;
};
// Rows that are too long for a threadgroup's registers get the variant "looped". `added` says whether the derivative
// adds another gradient.
NormBackwardPlan plan_norm_backward(const NormShape& shape, const Tensor& on, bool added);

}  // namespace metalcore

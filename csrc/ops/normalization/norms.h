// layer_norm, group_norm and rms_norm, for PyTorch's operators and C functions, and what their host sides share.
#pragma once

#include "../../../kernels/normalization/normalization.h"
#include "../common/common.h"
#include "../common/rows.h"

#include <initializer_list>
#include <optional>
#include <tuple>

namespace metalcore {

// ---------------------------------------------------------------- rows that are normalized

struct NormShape {
  int64_t rows;
  int64_t length;
};

// The last `dims` dimensions are normalized together.
NormShape norm_shape(const char* op, Sizes sizes, int64_t dims);

// Checks that a tensor has the device, the dtype and the shape of another one.
void check_like(const char* op, const char* argument, const Tensor& tensor, const Tensor& as);

// Kernels take a weight of the rows' dtype or of float32. A weight of another dtype is converted first.
MaybeTensor kernel_weight(const char* op, const MaybeTensor& weight, const Tensor& x, const NormShape& shape);

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

// The second stage of sums over rows (kernels/normalization/column_sums.metal): adds up the `chunks` rows of `partial`,
// float32. Its columns are those of `first` and then, if there is one, those of `second`, which has the dtype of
// `first`.
void record_column_sums(gpu::Recording& recording, const Tensor& partial, int64_t chunks, const Tensor& first,
                        const MaybeTensor& second = std::nullopt);

// ---------------------------------------------------------------- norms

// y, means and scales of the rows.
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, int64_t dims, const MaybeTensor& weight,
                                              const MaybeTensor& bias, double eps);
// Returns the gradients of x, of the weight and of the bias; the last two together or not at all (they are empty). With
// a residual, `x` is the sum x + residual, and `sum_grad` is the gradient that reaches this sum other than through y.
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& means,
                                                       const Tensor& scales, const MaybeTensor& sum_grad, int64_t dims,
                                                       const MaybeTensor& weight, bool parameters_wanted);

// y, means and scales of the groups.
std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& x, int64_t groups, const MaybeTensor& weight,
                                              const MaybeTensor& bias, double eps);
// Returns the gradients as layer_norm_backward does.
std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& means,
                                                       const Tensor& scales, int64_t groups, const MaybeTensor& weight,
                                                       bool parameters_wanted);

// rms_norm: y, and the scales 1 / sqrt(mean(x^2) + eps) of the rows in float32: of x's sizes, with ones for those of a
// row.
std::tuple<Tensor, Tensor> rms_norm_with_scales(const Tensor& x, int64_t dims, const MaybeTensor& weight, double eps);
// The gradients of x and of the weight (empty if it is not wanted).
std::tuple<Tensor, Tensor> rms_norm_backward_of_scales(const Tensor& grad, const Tensor& x, const Tensor& scales,
                                                       int64_t dims, const MaybeTensor& weight, bool weight_wanted);

// Over the last dimension, in memory that the caller has. y and `sum` (x + residual) are contiguous and have the shape
// of x.
void rms_norm_into(const Tensor& y, const Tensor& x, const MaybeTensor& weight, double eps);
void add_rms_norm_into(const Tensor& y, const Tensor& sum, const Tensor& x, const Tensor& residual,
                       const MaybeTensor& weight, double eps);

}  // namespace metalcore

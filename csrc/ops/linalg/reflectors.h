// Products of Householder reflectors H₀ H₁ …, applied many at a time as block reflectors I - V T Vᵀ (Schreiber and Van
// Loan 1989): kernels/linalg/reflectors.metal.
#pragma once

#include "../common.h"
#include "../../gpu/tuning.h"
#include "../../../kernels/linalg/reflectors.h"

#include <string>
#include <vector>

namespace metalcore {

// A contiguous tensor of a batch of rows x columns matrices.
struct RowMajor {
  Tensor tensor;
  uint32_t rows, columns;
};

// Consecutive reflectors of those that a matrix holds.
struct Reflectors {
  uint32_t first, width;
};

class BlockReflectors {
 public:
  // Of `count` reflectors below the diagonals of v's matrices, for targets of up to `columns` columns. Allocates.
  BlockReflectors(const RowMajor& v, const Tensor& tau, uint32_t batch, uint32_t count, uint32_t columns);

  uint32_t count() const { return count_; }
  uint32_t width() const { return width_; }  // of a block
  uint32_t blocks() const { return ceil_div(count_, width_); }
  Reflectors block(uint32_t index) const;

  // T of all blocks.
  void factor_all(gpu::Recording& recording) const;
  // T of a block, and its transpose applied to v's own columns on its right.
  void factor_and_update(gpu::Recording& recording, uint32_t block) const;
  // H or Hᵀ of a block, whose T is there, on columns [from, to) of the target.
  void apply(gpu::Recording& recording, uint32_t block, const RowMajor& target, uint32_t from, uint32_t to,
             bool transpose) const;
  // The transpose of up to REFLECTORS_NARROW reflectors with the factors t, on v's own columns [from, to).
  void apply_narrow(gpu::Recording& recording, Reflectors of, const Tensor& t, uint32_t from, uint32_t to) const;

  // H₀ H₁ … C, or its transpose; all T are there.
  void apply_all(gpu::Recording& recording, const RowMajor& target, bool transpose) const;

  // Of the blocks that so many reflectors are taken in.
  static uint32_t width_of(uint32_t count);

 private:
  struct Part;  // of the target
  ReflectorsParams params(Reflectors of, uint32_t blocks, const Part& part) const;
  void dispatch(gpu::Recording& recording, uint32_t index, ReflectorsParams p, uint32_t columns) const;
  void products(gpu::Recording& recording, const ReflectorsParams& p, uint32_t kernel_width,
                const Tensor& target) const;
  void make_factors(gpu::Recording& recording, const ReflectorsParams& p, uint32_t block) const;
  void update(gpu::Recording& recording, const ReflectorsParams& p, uint32_t kernel_width, const gpu::BufferView& t,
              const Tensor& target) const;
  gpu::BufferView factor_of(uint32_t block) const;

  RowMajor v_;
  Tensor tau_;
  uint32_t batch_, count_, width_, fill_;
  Tensor factors_, products_;
};

}  // namespace metalcore

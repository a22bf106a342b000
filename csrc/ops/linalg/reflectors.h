// Products of Householder reflectors H₀ H₁ …, applied many at a time as block reflectors I - V T Vᵀ (Schreiber and Van
// Loan 1989): kernels/linalg/reflectors.metal.
#pragma once

#include "../common/common.h"
#include "../../gpu/tuning.h"
#include "../../../kernels/linalg/reflectors.h"

namespace metalcore {

// A contiguous tensor of a batch of rows x columns matrices.
struct RowMajor {
  Tensor tensor;
  uint32_t rows, columns;
};

// Consecutive reflectors of a matrix.
struct ReflectorRange {
  uint32_t first, width;
};

class BlockReflectors {
 public:
  // `count` reflectors are below the diagonals of v's matrices, and targets have up to `columns` columns. It allocates
  // the memory that the other functions use.
  BlockReflectors(const RowMajor& v, const Tensor& tau, uint32_t batch, uint32_t count, uint32_t columns);

  uint32_t count() const { return count_; }
  uint32_t width() const { return width_; }  // reflectors of a block
  uint32_t blocks() const { return ceil_div(count_, width_); }
  ReflectorRange block(uint32_t index) const;

  // Makes T of all blocks.
  void factor_all(gpu::Recording& recording) const;
  // Makes T of a block, and applies the block's transpose to v's own columns on its right.
  void factor_and_update(gpu::Recording& recording, uint32_t block) const;
  // Applies a block's H or Hᵀ to columns [begin, end) of the target. T must exist.
  void apply(gpu::Recording& recording, uint32_t block, const RowMajor& target, uint32_t begin, uint32_t end,
             bool transpose) const;
  // Applies the transpose of up to REFLECTORS_NARROW reflectors with factors t to v's own columns [begin, end).
  void apply_narrow(gpu::Recording& recording, ReflectorRange range, const Tensor& t, uint32_t begin,
                    uint32_t end) const;

  // Multiplies the target by H₀ H₁ … or its transpose. T of all blocks must exist.
  void apply_all(gpu::Recording& recording, const RowMajor& target, bool transpose) const;

  // The width of the blocks for `count` reflectors.
  static uint32_t width_of(uint32_t count);

 private:
  struct TargetPart;
  ReflectorsParams params(ReflectorRange first_block, uint32_t blocks, const TargetPart& part) const;
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

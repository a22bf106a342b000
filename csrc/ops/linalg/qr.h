// The QR factorization: reflectors, its plan, what other ops use of it, and how its plans run.
#pragma once

#include "../../../kernels/linalg/qr.h"
#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "../common/common.h"
#include "cpu_route.h"
#include "matrices.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace metalcore {

// ---------------------------------------------------------------- reflectors (reflectors.cpp)

// A contiguous tensor of a batch of rows x columns matrices.
struct RowMajor {
  Tensor tensor;
  uint32_t rows, columns;
};

// Consecutive reflectors of a matrix.
struct ReflectorRange {
  uint32_t first, width;
};

// Products of Householder reflectors H₀ H₁ …, applied many at a time as block reflectors I - V T Vᵀ (Schreiber and Van
// Loan 1989): kernels/linalg/reflectors.metal.
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

// ---------------------------------------------------------------- plans

// How a QR factorization runs: the kernels of kernels/linalg/qr_*.metal, and their grids.
enum class QrVariant { empty, simd, block, tall, blocked, torch, cpu };

const char* name_of(QrVariant variant);

struct QrTuning {
  const char* family;
  // A simdgroup takes matrices of up to simd_rows rows (and 32 columns), and a threadgroup of up to block_threads
  // threads takes larger ones. Taller ones with up to tall_columns columns are split into blocks of rows.
  uint32_t simd_rows = 64;
  uint32_t block_threads = 512;
  uint32_t tall_columns = 64;
  // Here the size is the smaller of rows and columns. PyTorch also takes a single matrix of up to torch_rows rows that
  // is too tall for a panel in one threadgroup, and too wide for blocks of rows.
  TorchRegions torch = {};
  uint32_t torch_rows = 0;
  TorchRegions geqrf_torch = {};  // those of geqrf beside `torch`
  TorchRegions cpu = {};
  // Here the size is the number of reflectors.
  TorchRegions householder_product_torch = {}, ormqr_torch = {};
  TorchRegions householder_product_cpu = {}, ormqr_cpu = {};
};
extern const gpu::Table<QrTuning> qr_tuning;

// Blocks of rows, each of which a threadgroup factors alone. A matrix that fits is one block. Level 0 of a tall matrix
// has its rows, and each other level has the stacked R of the level before.
struct QrLevel {
  uint32_t rows, blocks, block_rows;
  std::string kernel;
  uint32_t threads;
};

struct QrPlan {
  QrVariant variant;
  std::string why;
  std::string simd_kernel;
  uint32_t matrices_per_threadgroup;
  std::vector<QrLevel> levels;  // block: one, tall: several
};

// The plan for `batch` m x n matrices with `q_columns` columns of Q (0: Q is not wanted).
QrPlan plan_qr(int64_t m, int64_t n, int64_t batch, int64_t q_columns, bool is_complex, const QrTuning& tuning);

// The plan for the reflectors alone, or for Q from given ones. It is QR's plan, except that variant tall, which has no
// reflectors, does not occur.
QrPlan plan_reflectors(int64_t m, int64_t n, int64_t batch, int64_t q_columns, bool is_complex, const QrTuning& tuning);

// The operator metalcore::qr returns (Q, R). The modes are "reduced", "complete" and "r".
std::tuple<Tensor, Tensor> qr(const Tensor& a, const std::string& mode);

// The operator metalcore::qr_scaled returns (Q, R, scale), scale (*, 1, 1): the reduced QR decomposition of each matrix
// times its scale. The scales are powers of two, so that R is in range where A's norms are not.
std::tuple<Tensor, Tensor, Tensor> qr_scaled(const Tensor& a);

// Matrices that fit in a simdgroup or a threadgroup: kernels/linalg/qr_simd.metal and qr_block.metal.

// What the kernels do (QR_FACTORS, QR_REFLECTORS or QR_FORM), the number of reflectors, and the results' sizes.
struct SmallQr {
  uint32_t task, reflectors;
  uint32_t q_columns, r_rows;
};

// Arguments of the kernels for whole matrices. qr_tall.metal's arguments for blocks of rows begin as these.
QrParams small_params(const Matrices& a, const SmallQr& task);

// plan.variant must be simd or block. `r` becomes R or the packed reflectors. For results that the task does not have,
// any tensor will do.
void run_small(const QrPlan& plan, const Matrices& a, const SmallQr& task, const Tensor& q, const Tensor& r,
               const Tensor& tau);

// Matrices of any size in panels: kernels/linalg/qr_panel.metal and reflectors.metal.

// LAPACK's geqrf in place. It also makes T of the blocks of reflectors.
class BlockedQr {
 public:
  // `a` holds the matrices, and then their factors. The reflectors will be applied to at most `columns` columns.
  BlockedQr(const RowMajor& a, const Tensor& tau, uint32_t batch, uint32_t columns);

  // Makes T of the last block only with `for_q`, because only Q needs it.
  void factor(gpu::Recording& recording, bool for_q) const;
  const BlockReflectors& reflectors() const { return reflectors_; }

 private:
  void factor_panel(gpu::Recording& recording, ReflectorRange range) const;

  RowMajor a_;
  Tensor tau_;
  uint32_t batch_;
  BlockReflectors reflectors_;
  Tensor panel_factor_;     // T of the current panel
  Tensor sums_[2], state_;  // scratch memory of panels that several threadgroups share
};

// Sets q to the first columns of the identity.
void set_identity(gpu::Recording& recording, const RowMajor& q);
// LAPACK's orgqr: sets q to the first columns of H₀ H₁ …. T of all blocks must exist.
void form_q(gpu::Recording& recording, const BlockReflectors& reflectors, const RowMajor& q);

// Dispatches a thread for each element.
void dispatch_elements(gpu::Recording& recording, int64_t count);

}  // namespace metalcore

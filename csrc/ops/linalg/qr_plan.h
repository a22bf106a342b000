// How a QR factorization runs: which kernels of kernels/linalg/qr_*.metal, over which grids.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "left_to_torch.h"

#include <cstdint>
#include <string>
#include <vector>

namespace metalcore {

enum class QrVariant { empty, simd, block, tall, blocked, torch };

const char* name_of(QrVariant variant);

struct QrTuning {
  const char* family;
  // Matrices of up to so many rows (and 32 columns) go to a simdgroup, others to a threadgroup of up to so many
  // threads; taller ones with up to so many columns are split into blocks of rows.
  uint32_t simd_rows = 64;
  uint32_t block_threads = 512;
  uint32_t tall_columns = 64;
  // Left to PyTorch by the smaller of rows and columns; a single matrix also if it is taller than a threadgroup holds a
  // panel of, up to so many rows, and wider than what is split into blocks of rows.
  LeftToTorch torch = {};
  uint32_t torch_rows = 0;
  // By the number of reflectors.
  LeftToTorch householder_product_torch = {}, ormqr_torch = {};
};
extern const gpu::Table<QrTuning> qr_tuning;

// Blocks of rows that are factored by themselves, each by a threadgroup: one for a matrix that fits, else level 0 of a
// tall one and then the stacked R of the level before.
struct QrLevel {
  uint32_t rows, blocks, block_rows;
  const char* kernel;
  uint32_t threads;
};

struct QrPlan {
  QrVariant variant;
  std::string why;
  std::string simd_kernel;
  uint32_t matrices_per_threadgroup;
  std::vector<QrLevel> levels;  // block: one, tall: several
};

// Of `batch` m x n matrices with `q_columns` columns of Q (0: Q is not wanted).
QrPlan plan_qr(int64_t m, int64_t n, int64_t batch, int64_t q_columns, const QrTuning& tuning);

// Of their reflectors alone, or of Q from given ones: as for QR, but for variant tall, which has no reflectors.
QrPlan plan_reflectors(int64_t m, int64_t n, int64_t batch, int64_t q_columns, const QrTuning& tuning);

}  // namespace metalcore

// How a QR factorization runs: the kernels of kernels/linalg/qr_*.metal, and their grids.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "torch_regions.h"

#include <cstdint>
#include <string>
#include <vector>

namespace metalcore {

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

// The plan for `batch` m x n matrices with `q_columns` columns of Q (0: Q is not wanted).
QrPlan plan_qr(int64_t m, int64_t n, int64_t batch, int64_t q_columns, const QrTuning& tuning);

// The plan for the reflectors alone, or for Q from given ones. It is QR's plan, except that variant tall, which has no
// reflectors, does not occur.
QrPlan plan_reflectors(int64_t m, int64_t n, int64_t batch, int64_t q_columns, const QrTuning& tuning);

}  // namespace metalcore

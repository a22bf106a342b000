// What plans need to know of a GPU: its limits, which no plan may exceed, and numbers that only affect speed.
#pragma once

#include "encoder.h"

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::gpu {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;                 // per threadgroup
constexpr uint32_t kMaxThreadgroupMemory = 32 * 1024;  // bytes

// Which batches of matrices PyTorch's own op is faster at: regions of sizes (rows or columns, whichever are more; or
// what else is said of them), and of numbers of matrices.
struct Region {
  int64_t above = 0, up_to = INT64_MAX;  // sizes
  int64_t least = 1, most = INT64_MAX;   // matrices
};
class LeftToTorch {
 public:
  constexpr LeftToTorch() = default;
  constexpr LeftToTorch(std::initializer_list<Region> regions) {
    for (const Region& region : regions) regions_.at(count_++) = region;
  }
  constexpr bool takes(int64_t size, int64_t batch) const {
    for (size_t i = 0; i < count_; ++i) {
      const Region& r = regions_[i];
      if (size > r.above && size <= r.up_to && batch >= r.least && batch <= r.most) return true;
    }
    return false;
  }

 private:
  std::array<Region, 3> regions_ = {};
  size_t count_ = 0;
};

struct Tuning {
  const char* family;
  // Reductions over rows: up to this length a thread takes a row by itself …
  uint32_t thread_row;
  // … up to this one a simdgroup does, of which `simd_rows` share a threadgroup …
  uint32_t simd_row;
  uint32_t simd_rows;
  // … up to this one a threadgroup keeps the row in registers; beyond, `looped_threads` walk it twice.
  uint32_t block_row;
  uint32_t looped_threads;
  // Sums over rows: about so many threads share the rows between them.
  uint32_t row_threads = 65536;
  // QR: matrices of up to so many rows (and 32 columns) go to a simdgroup, others to a threadgroup of up to so many
  // threads; taller ones with up to so many columns are split into blocks of rows.
  uint32_t qr_simd_rows = 64;
  uint32_t qr_block_threads = 512;
  uint32_t qr_tall_columns = 64;
  // Left to PyTorch by the smaller of rows and columns; a single matrix also if it is taller than a threadgroup holds a
  // panel of, up to so many rows, and wider than what is split into blocks of rows.
  LeftToTorch qr_torch = {};
  uint32_t qr_torch_rows = 0;
  // By the number of reflectors.
  LeftToTorch householder_product_torch = {}, ormqr_torch = {};
  // Matrix products, and the rounds of blocked Jacobi, are split until about so many threadgroups run.
  uint32_t fill_threadgroups = 64;
  // Cholesky: matrices of up to so many rows go to a threadgroup, larger ones are factored in panels. Upper factors,
  // which cost PyTorch a copy more, are never left to it.
  uint32_t cholesky_block_rows = 128;
  LeftToTorch cholesky_torch = {};
  // LU: matrices (with columns of B) that fit so many threads, of 32 elements each, are factored in registers.
  uint32_t lu_block_threads = 1024;
  LeftToTorch lu_torch = {}, lu_solve_torch = {};
  // Triangular systems of order above 32. With fewer threadgroups of 32 right-hand sides than triangular_panel_groups,
  // simdgroups share the rows; above that a threadgroup takes more right-hand sides as long as there are
  // triangular_groups threadgroups. Systems with one right-hand side take many threads each where there are fewer of
  // them than triangular_vector_batch.
  uint32_t triangular_panel_groups = 1024;
  uint32_t triangular_groups = 256;
  uint32_t triangular_vector_batch = 264;
  // With more than four right-hand sides, and with one. (With two to four none is left to PyTorch.)
  LeftToTorch triangular_torch = {}, triangular_vector_torch = {};
  // Blocked Jacobi: sweeps at most.
  uint32_t jacobi_sweeps = 24;
  LeftToTorch eigh_torch = {};
  // By the number of the product's rows.
  LeftToTorch syrk_torch = {};
  // AdamW: whether neighbouring threads load neighbouring vectors of four, rather than each what one after the other
  // has.
  bool adamw_vectors = true;
};

// The row of the GPU's family that a tensor is on, or of a device type ("mps", "cuda"); or the one chosen by
// use_tuning().
const Tuning& tuning(const Tensor& on);
const Tuning& tuning(std::string_view device_type);

// Plans as for another family from now on ("" for each GPU's own); throws std::invalid_argument for an unknown one.
// For tests and for asking what a plan would be elsewhere.
void use_tuning(std::string_view family);
const char* chosen_tuning();
std::vector<std::string> tuning_families();

}  // namespace metalcore::gpu

// What plans need to know of a GPU: its limits, which no plan may exceed, and numbers that only affect speed.
#pragma once

#include "encoder.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::gpu {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;                // per threadgroup
constexpr uint32_t kMaxThreadgroupMemory = 32 * 1024;  // bytes

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
  // A single matrix goes to PyTorch's op if it has so many columns and rows, or if it is taller than a threadgroup holds
  // a panel of, up to so many rows, and wider than what is split into blocks of rows …
  uint32_t qr_torch_columns = UINT32_MAX;
  uint32_t qr_torch_rows = 0;
  // … and so do a single matrix's reflectors, if there are more than so many to apply, or for ormqr up to so few.
  uint32_t reflectors_torch_above = UINT32_MAX;
  uint32_t ormqr_torch_below = 0;
  // Matrix products are split until about so many threadgroups run.
  uint32_t fill_threadgroups = 64;
  // AdamW: whether neighbouring threads load neighbouring vectors of four, rather than each what one after the other has.
  bool adamw_vectors = true;
};

// The row of the GPU's family that a tensor is on, or of a device type ("mps", "cuda"); or the one chosen by use_tuning().
const Tuning& tuning(const Tensor& on);
const Tuning& tuning(std::string_view device_type);

// Plans as for another family from now on ("" for each GPU's own); throws std::invalid_argument for an unknown one.
// For tests and for asking what a plan would be elsewhere.
void use_tuning(std::string_view family);
std::vector<std::string> tuning_families();

}  // namespace metalcore::gpu

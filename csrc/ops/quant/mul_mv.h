// How products of packed weights and few rows of x are shared out.
#pragma once

#include "../common/common.h"

#include <optional>
#include <string>

namespace metalcore {

struct MvPlan {
  uint32_t x_rows;  // of a threadgroup: 1, 2 or 4, as in the kernels' names
  uint32_t simdgroups, group_rows;

  std::string kernel(const std::string& format) const;
  int64_t threadgroups(int64_t rows, int64_t all_x_rows) const;
  void note(const char* op, int64_t all_x_rows, const std::string& format) const;
};

MvPlan plan_mv(int64_t rows, int64_t length, int64_t x_rows, bool experts, const Tensor& on);

// How products by the matrix units are shared out, if the device takes them for so many rows of x in this dtype.
struct TilesPlan {
  uint32_t x_rows;  // of a threadgroup: 8 or 16, as in the kernels' names
  uint32_t simdgroups;

  std::string kernel(const std::string& format, ScalarType dtype) const;
  int64_t threadgroups(int64_t rows, int64_t all_x_rows) const;
  void note(const char* op, int64_t all_x_rows, const std::string& format) const;
};
std::optional<TilesPlan> plan_tiles(int64_t length, int64_t x_rows, const Tensor& x);

// The rows of x up to which the weights of a product are read as they are.
int64_t most_mv_rows(const Tensor& on);

}  // namespace metalcore

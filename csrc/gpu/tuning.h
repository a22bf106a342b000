// Numbers that only affect speed. Each family of ops has a table of its own, with a row for each family of GPUs on
// which somebody has tuned it, and a baseline row for all others:
//   struct LuTuning { const char* family; uint32_t block_threads = 1024; };
//   const gpu::Table<LuTuning> lu_tuning = {{.family = "baseline"}, {.family = "hopper", .block_threads = 512}};
//   const LuTuning& tuning = lu_tuning(a);
#pragma once

#include "buffer.h"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::gpu {

using Family = uint32_t;  // 0 is the baseline

// The family that use_tuning() chose, or else that of the tensor's GPU.
Family family_of(const Tensor& tensor);
// The number of a family's name. The first call with a name assigns one.
Family family_named(std::string_view name);

template <typename Row>
class Table {
 public:
  Table(std::initializer_list<Row> rows) : rows_(rows) {
    for (const Row& row : rows_) {
      const Family family = family_named(row.family);
      if (by_family_.size() <= family) by_family_.resize(family + 1);
      by_family_[family] = static_cast<uint32_t>(&row - rows_.data());
    }
  }
  const Row& operator()(const Tensor& tensor) const { return row(family_of(tensor)); }
  const Row& row(Family family) const { return rows_[family < by_family_.size() ? by_family_[family] : 0]; }

 private:
  std::vector<Row> rows_;            // the first is the baseline
  std::vector<uint32_t> by_family_;  // indices of rows
};

// How many threadgroups keep a GPU busy. Ops split their work into about so many where they can.
struct Parallelism {
  const char* family;
  uint32_t fill_threadgroups = 64;
};
extern const Table<Parallelism> parallelism;

// From now on ops plan as on this family of GPUs, or with "" as on each GPU's own. Throws std::invalid_argument for an
// unknown family. Tests use it, and explain, which tells what a plan would be on another GPU.
void use_tuning(std::string_view family);
std::string chosen_tuning();
std::vector<std::string> tuning_families();

}  // namespace metalcore::gpu

// Numbers that only affect speed. Each family of ops has a table of its own, with a row for each family of GPUs that
// somebody has tuned it for, and a baseline row for all others:
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

// The family of the GPU that a tensor is on, or the one that use_tuning() chose.
Family family_of(const Tensor& on);
// The number of a family's name, given when it is first asked for.
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
  const Row& operator()(const Tensor& on) const { return row(family_of(on)); }
  const Row& row(Family family) const { return rows_[family < by_family_.size() ? by_family_[family] : 0]; }

 private:
  std::vector<Row> rows_;            // the first is the baseline
  std::vector<uint32_t> by_family_;  // indices of rows
};

// How many threadgroups keep a GPU busy: work that can be split is split until there are about so many.
struct Parallelism {
  const char* family;
  uint32_t fill_threadgroups = 64;
};
extern const Table<Parallelism> parallelism;

// Plans as for another family from now on ("" for each GPU's own); throws std::invalid_argument for an unknown one.
// For tests and for asking what a plan would be elsewhere.
void use_tuning(std::string_view family);
std::string chosen_tuning();
std::vector<std::string> tuning_families();

}  // namespace metalcore::gpu

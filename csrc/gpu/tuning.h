// Numbers that only affect speed. Each family of ops has a table of its own, with a row for each family of GPUs on
// which somebody has tuned it, and a baseline row for all others:
//   struct LuTuning { const char* family; uint32_t block_threads = 1024; };
//   const gpu::Table<LuTuning> lu_tuning("lu", {{"block_threads", &LuTuning::block_threads, {32, 1024, 32}}},
//                                        {{.family = "baseline"}, {.family = "hopper", .block_threads = 512}});
//   const LuTuning& tuning = lu_tuning(a);
//
// The numbers of the baseline are those of Apple's families, unless these have rows of their own. What depends on the
// number of cores is a Count for each core. Nobody has measured it on an Apple GPU: it follows from kFilling.
#pragma once

#include "buffer.h"
#include "tunable.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::gpu {

using Family = uint32_t;  // 0 is the baseline

// The family of what was measured on this machine, and how plans name it in their reasons.
constexpr Family kMeasuredHere = 1;
constexpr const char* kThisMachine = "this machine";

// So many simdgroups of a core keep an Apple GPU's ALUs busy, measured on an M1 Max by Philip Turner
// (github.com/philipturner/metal-benchmarks), where a core runs 12 to 96 of them (384 to 3072 threads), by their
// registers. Memory needs fewer: an M1 Max moves 410 GB/s and answers in about 0.35 us, so that 140 KB are on their way
// to 32 cores, 4.4 KB to each, and 24 simdgroups that load 16 bytes a thread ask for 12 KB.
constexpr uint32_t kFilling = 24;
constexpr Count filling_threadgroups(uint32_t simdgroups) { return per_core(kFilling / simdgroups); }

// The families of GPUs with cores of their own. A table that has no row for one has the baseline's numbers, and its
// cores.
constexpr const char* kFamilies[] = {"apple7", "apple8", "apple9", "apple10", "hopper"};

// The cores of a family's GPUs: those of the GPU here if it is of the family, or else a usual number.
std::atomic<uint32_t>& cores_of(Family family);

// The family that use_tuning() chose, or else that of the tensor's GPU.
Family family_of(const Tensor& tensor);
// Whether the tensor's GPU has units that multiply tensors, where its family has.
bool multiplies_tensors(const Tensor& tensor);
// Whether these units also multiply what threads hold.
bool multiplies_held_tensors(const Tensor& tensor);
// The most threadgroups that the tensor's GPU runs together (Recording::together).
uint32_t most_together(const Tensor& tensor);
// The number of a family's name. The first call with a name assigns one.
Family family_named(std::string_view name);

template <typename Row>
class Table final : public AnyTable {
 public:
  // `fields` are those that `tune` may measure.
  Table(const char* name, std::initializer_list<Field<Row>> fields, std::initializer_list<Row> rows)
      : AnyTable(name), fields_(fields), rows_(rows) {
    for (const char* family : kFamilies) {
      if (std::any_of(rows_.begin(), rows_.end(),
                      [&](const Row& row) { return std::string_view(row.family) == family; }))
        continue;
      Row row = rows_.front();
      row.family = family;
      rows_.push_back(row);
    }
    for (Row& row : rows_) {
      const Family family = family_named(row.family);
      for (const Field<Row>& field : fields_)
        if (field.count) field.count(row)->bind(cores_of(family));
      if (by_family_.size() <= family) by_family_.resize(family + 1);
      by_family_[family] = static_cast<uint32_t>(&row - rows_.data());
    }
  }
  const Row& operator()(const Tensor& tensor) const { return row(family_of(tensor)); }
  const Row& row(Family family) const {
    if (const Row* measured = family == kMeasuredHere ? measured_.load(std::memory_order_acquire) : nullptr)
      return *measured;
    return rows_[family < by_family_.size() ? by_family_[family] : 0];
  }

  std::vector<Tunable> tunables(Family family) const override {
    Row of = row(family);
    std::vector<Tunable> all;
    for (const Field<Row>& field : fields_)
      all.push_back({name(), field.name, field.kind, field.read(of), field.legal,
                     std::string_view(of.family) == kThisMachine, field.count ? field.count(of)->for_each_core() : 0});
    return all;
  }

  std::function<void()> prepare(Family family, const std::vector<Measured>& values,
                                std::string_view device_type) const override {
    Row changed = row(family);
    for (const Measured& value : values) {
      if (value.table != name()) continue;
      write(changed, value, device_type);
      changed.family = kThisMachine;
    }
    return [this, changed] {
      const std::lock_guard<std::mutex> lock(mutex_);
      published_.push_back(std::make_unique<const Row>(changed));
      measured_.store(published_.back().get(), std::memory_order_release);
    };
  }

 private:
  void write(Row& row, const Measured& value, std::string_view device_type) const {
    for (const Field<Row>& field : fields_) {
      if (field.name != value.field) continue;
      if (!field.legal.only_on.empty() && field.legal.only_on != device_type)
        refuse(field.name, "it is measured on " + std::string(field.legal.only_on) + " devices only");
      if (lacks(device_type, field.legal.calls))
        refuse(field.name, "PyTorch has no kernel of aten::" + std::string(field.legal.calls) + " for " +
                               std::string(device_type) + " devices");
      try {
        return field.write(row, value.value);
      } catch (const std::invalid_argument& error) {
        refuse(field.name, error.what());
      }
    }
    refuse(value.field, "there is no such field");
  }

  std::vector<Field<Row>> fields_;
  std::vector<Row> rows_;            // the first is the baseline
  std::vector<uint32_t> by_family_;  // indices of rows
  mutable std::atomic<const Row*> measured_ = nullptr;
  // A plan on another thread may still read an older row, so that none is freed.
  mutable std::vector<std::unique_ptr<const Row>> published_;
  mutable std::mutex mutex_;
};

// How many threadgroups keep a GPU busy. Ops split their work into about so many where they can.
struct Parallelism {
  const char* family;
  Count fill_threadgroups = filling_threadgroups(8);  // of 256 threads, as most of these have
};
extern const Table<Parallelism> parallelism;

// From now on ops plan as on this family of GPUs, or with "" as on each GPU's own. Throws std::invalid_argument for an
// unknown family. Tests use it, and explain, which tells what a plan would be on another GPU.
void use_tuning(std::string_view family);
std::string chosen_tuning();
std::vector<std::string> tuning_families();
// It changes whenever plans may change.
uint64_t tuning_version();

}  // namespace metalcore::gpu

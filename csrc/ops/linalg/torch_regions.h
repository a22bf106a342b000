// The batches of matrices for which PyTorch's own op is faster, on their device or on the CPU.
#pragma once

#include "../../gpu/tuning.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

namespace metalcore {

// A range of sizes and of numbers of matrices. The size is the larger of rows and columns, unless a table says
// otherwise.
struct Region {
  int64_t above = 0, up_to = INT64_MAX;          // sizes
  int64_t min_batch = 1, max_batch = INT64_MAX;  // matrices
};

class TorchRegions {
 public:
  constexpr TorchRegions() = default;
  constexpr TorchRegions(std::initializer_list<Region> regions) {
    for (const Region& region : regions) regions_.at(count_++) = region;
  }
  constexpr bool contain(int64_t size, int64_t batch) const {
    for (size_t i = 0; i < count_; ++i) {
      const Region& r = regions_[i];
      if (size > r.above && size <= r.up_to && batch >= r.min_batch && batch <= r.max_batch) return true;
    }
    return false;
  }

  // As a tunable field: four numbers for each region, in the order of Region's.
  static constexpr const char* kind = "regions";
  gpu::Numbers numbers() const {
    gpu::Numbers all;
    for (size_t i = 0; i < count_; ++i)
      all.insert(all.end(), {regions_[i].above, regions_[i].up_to, regions_[i].min_batch, regions_[i].max_batch});
    return all;
  }
  static TorchRegions from(const gpu::Numbers& numbers) {
    TorchRegions made;
    if (numbers.size() % 4 != 0 || numbers.size() > 4 * made.regions_.size())
      throw std::invalid_argument(std::to_string(numbers.size()) + " numbers are not up to three regions of four");
    for (size_t i = 0; i < numbers.size(); i += 4) {
      const Region region{numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]};
      if (region.above < 0 || region.up_to <= region.above || region.min_batch < 1 ||
          region.max_batch < region.min_batch)
        throw std::invalid_argument("region " + std::to_string(i / 4 + 1) +
                                    " is not 0 <= above < up_to, 1 <= min_batch <= max_batch");
      made.regions_.at(made.count_++) = region;
    }
    return made;
  }

 private:
  std::array<Region, 3> regions_ = {};
  size_t count_ = 0;
};

// "PyTorch's own op is faster (measured on hopper GPUs)", for a plan's reason.
inline std::string faster_by_torch(const char* family) {
  const std::string where = std::string_view(family) == gpu::kThisMachine ? family : family + std::string(" GPUs");
  return "PyTorch's own op is faster (measured on " + where + ")";
}

// Says why a plan takes PyTorch's op on the CPU. The built-in rows have estimates.
inline std::string faster_on_cpu(const char* family) {
  const bool measured = std::string_view(family) == gpu::kThisMachine;
  return "PyTorch's own op is faster on the CPU (" +
         std::string(measured ? "measured on this machine" : "an estimate") +
         "); the input is copied there and the results back, and the host waits";
}

// Whether a plan's variant is PyTorch's own op, on the tensors' device or on the CPU.
template <typename Variant>
constexpr bool is_left(Variant variant) {
  return variant == Variant::torch || variant == Variant::cpu;
}

}  // namespace metalcore

// The batches of matrices for which PyTorch's own op is faster, on their device or on the CPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

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

 private:
  std::array<Region, 3> regions_ = {};
  size_t count_ = 0;
};

// "PyTorch's own op is faster (measured on hopper GPUs)", for a plan's reason.
inline std::string faster_by_torch(const char* family) {
  return "PyTorch's own op is faster (measured on " + std::string(family) + " GPUs)";
}

// The same for a plan that takes PyTorch's op on the CPU. Rows of families that nobody has measured have estimates.
inline std::string faster_on_cpu(const char* family) {
  return "PyTorch's own op is faster on the CPU (tuning row " + std::string(family) +
         "): the input is copied there and the results back, and the host waits";
}

// Whether a plan's variant is PyTorch's own op, on the tensors' device or on the CPU.
template <typename Variant>
constexpr bool is_left(Variant variant) {
  return variant == Variant::torch || variant == Variant::cpu;
}

}  // namespace metalcore

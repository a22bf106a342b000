// PyTorch's own op for matrices that a plan leaves to it, on their device or on the CPU where LAPACK is faster, and the
// regions of sizes for which a plan does so.
#pragma once

#include "../../gpu/tuning.h"
#include "matrices.h"

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

// The batches of matrices for which PyTorch's own op is faster.
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

// The tuning of ops whose rows only say which batches PyTorch's own op takes, on the GPU and on the CPU.
struct RouteTuning {
  const char* family;
  TorchRegions torch = {}, cpu = {};
};

// What takes matrices: a simdgroup, or a threadgroup in its memory or in the device's, or PyTorch's own op.
enum class SizeVariant { empty, simd, block, device, torch, cpu };

const char* name_of(SizeVariant variant);

struct SizePlan {
  SizeVariant variant;
  std::string why, kernel;
  uint32_t matrices_per_threadgroup, threads;
};

// A kernel of an op of square matrices, and the largest that it takes.
struct SizeKernel {
  int64_t most_rows;
  SizeVariant variant;
  const char* how;  // what it does, for the plan's reason
  std::string name;
  uint32_t matrices_per_threadgroup, threads;
};

// The plan for `batch` n x n matrices: the first kernel that takes them, except where there is nothing to do, or where
// PyTorch's op takes them. It may not take all kinds of matrices on the GPU.
SizePlan plan_by_size(int64_t n, int64_t batch, const char* nothing, const RouteTuning& tuning, bool torch_may,
                      std::initializer_list<SizeKernel> kernels);

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

// Says why a plan takes PyTorch's op on the CPU for matrices that are too large for all kernels.
inline std::string too_large_for_kernels(const std::string& size) {
  return size + " is more than the kernels hold: PyTorch's op on the CPU, for which the host waits";
}

// Whether a plan's variant is PyTorch's own op, on the tensors' device or on the CPU.
template <typename Variant>
constexpr bool is_left(Variant variant) {
  return variant == Variant::torch || variant == Variant::cpu;
}

// A copy in the CPU's memory, with the same strides if the tensor is dense, or else contiguous. The host waits for it.
// A tensor without memory has a copy without memory, so that explain sees the same steps.
Tensor copy_to_cpu(const Tensor& tensor);
// Arguments that are not tensors go to PyTorch's op as they are.
template <typename Argument>
const Argument& copy_to_cpu(const Argument& argument) {
  return argument;
}
// A contiguous copy on the device of `like`.
Tensor copy_back(const Tensor& result, const Tensor& like);

// How many calls of this thread PyTorch's ops on the CPU have served. The report of overrides asks for it.
int64_t& calls_on_cpu();

// Calls PyTorch's own op of this name for a plan's variant `torch` or `cpu`. Results of `cpu` are contiguous, and on
// the device of the first argument.
template <size_t RESULTS, typename Variant, typename... Arguments>
std::array<Tensor, RESULTS> call_left(Variant variant, const char* name, const Tensor& first,
                                      const Arguments&... others) {
  if (variant != Variant::cpu) return call_torch<RESULTS>(name, "", first, others...);
  ++calls_on_cpu();
  std::array<Tensor, RESULTS> results = call_torch<RESULTS>(name, "", copy_to_cpu(first), copy_to_cpu(others)...);
  for (Tensor& result : results) result = copy_back(result, first);
  return results;
}

// LAPACK refuses a batch in which a number of an SVD or an eigendecomposition is NaN or infinite. These take such
// matrices out of a copy in the CPU's memory, which is contiguous, and make their results NaN, as the kernels do.
enum class Entries { all, lower, upper };  // those that the op reads
class NotFinite {
 public:
  NotFinite(const Tensor& copy, Entries entries);
  Tensor mark(const Tensor& result) const;

 private:
  int64_t batch_;
  std::vector<int64_t> matrices_;
};

// call_left<RESULTS>() on the CPU for such an op. `options` are its arguments after A.
template <size_t RESULTS, typename... Options>
std::array<Tensor, RESULTS> decompose_on_cpu(const char* name, const Tensor& a, Entries entries,
                                             const Options&... options) {
  ++calls_on_cpu();
  const Tensor copy = copy_to_cpu(as_contiguous(a));
  const NotFinite not_finite(copy, entries);
  std::array<Tensor, RESULTS> results = call_torch<RESULTS>(name, "", copy, options...);
  for (Tensor& result : results) result = copy_back(not_finite.mark(result), a);
  return results;
}

}  // namespace metalcore

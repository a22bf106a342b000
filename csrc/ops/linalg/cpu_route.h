// PyTorch's own op for matrices that a plan leaves to it: on their device, or on the CPU where LAPACK is faster.
#pragma once

#include "matrices.h"
#include "torch_regions.h"

#include <array>
#include <cstdint>

namespace metalcore {

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

// _run_generated: one dispatch of a kernel that Python has generated (metalcore/programs/pointwise). The outputs are
// its first buffers, the inputs the next ones, and the last one has `numbers`, as 32 or 64 bits each.
#include "common.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace metalcore {
namespace {

gpu::Size to_size(const std::vector<int64_t>& sizes) {
  check(
      sizes.size() == 3 && std::all_of(sizes.begin(), sizes.end(), [](int64_t n) { return n >= 0 && n <= UINT32_MAX; }),
      "metalcore: a grid has three sides of 32 bits");
  return {static_cast<uint32_t>(sizes[0]), static_cast<uint32_t>(sizes[1]), static_cast<uint32_t>(sizes[2])};
}

template <typename Number>
void bind_numbers(gpu::Recording& recording, uint32_t index, const std::vector<int64_t>& numbers) {
  const std::vector<Number> converted(numbers.begin(), numbers.end());
  recording.bytes(index, converted.data(), converted.size() * sizeof(Number));
}

void run_generated(const std::string& kernel, const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                   const std::vector<int64_t>& numbers, bool wide, const std::vector<int64_t>& threads,
                   const std::vector<int64_t>& threadgroup, const std::string& op, const std::string& variant,
                   const std::string& why) {
  check(!outputs.empty(), "metalcore: a generated kernel has an output");
  for (const Tensor& input : inputs) check_same_device(op.c_str(), "an input", input, outputs[0]);
  gpu::note_plan(op.c_str(), variant.c_str(), [&] { return why; });
  gpu::record(outputs[0], [&](gpu::Recording& recording) {
    recording.kernel(kernel);
    uint32_t index = 0;
    for (const Tensor& output : outputs) recording.buffer(index++, output);
    for (const Tensor& input : inputs) recording.buffer(index++, input);
    wide ? bind_numbers<uint64_t>(recording, index, numbers) : bind_numbers<uint32_t>(recording, index, numbers);
    recording.dispatch_threads(to_size(threads), to_size(threadgroup));
  });
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "_run_generated(str kernel, Tensor(a!)[] outputs, Tensor[] inputs, int[] numbers, bool wide, int[] threads, "
      "int[] threadgroup, str op, str variant, str why) -> ()");
}

// No operator of PyTorch can take the place of a kernel that the GPU refuses, so that is an error.
STABLE_TORCH_LIBRARY_IMPL(metalcore, MPS, m) { m.impl("_run_generated", TORCH_BOX(&metalcore::run_generated)); }
STABLE_TORCH_LIBRARY_IMPL(metalcore, CUDA, m) { m.impl("_run_generated", TORCH_BOX(&metalcore::run_generated)); }

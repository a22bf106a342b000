#include "multi_tensor.h"

#include "../../gpu/tuning.h"

#include <algorithm>
#include <array>

namespace metalcore {
namespace {

struct OptimTuning {
  const char* family;
  // Whether neighbouring threads load neighbouring vectors of 16 bytes. Otherwise each thread loads a run of its own.
  bool vectors = true;
  int64_t threads = 64;  // of a threadgroup
  int64_t strips = 2;    // of OPTIM_STRIP elements, which each of its simdgroups works on
};
const gpu::Table<OptimTuning> optim_tuning("optim",
                                           {{"vectors", &OptimTuning::vectors},
                                            {"threads", &OptimTuning::threads, {32, OPTIM_MAX_THREADS, 32}},
                                            {"strips", &OptimTuning::strips, {1, 16}}},
                                           {{.family = "baseline"}, {.family = "simulator", .vectors = false}});

// A thread walks over at most so many times the elements that the tuning row says.
constexpr uint64_t kLargerChunks = 64;

void check_scalar(const char* op, const char* argument, const MaybeTensor& tensor, const Tensor& reference) {
  if (!tensor) return;
  check_same_device(op, argument, *tensor, reference);
  check(tensor->numel() == 1 && tensor->scalar_type() == ScalarType::Float, "metalcore::", op, ": ", argument,
        " must be one float32 element");
}

}  // namespace

OptimPlan::OptimPlan(const ParameterArrays& arrays, size_t first, size_t count, uint64_t most_chunks) {
  const OptimTuning& tuning = optim_tuning(arrays.first());
  const auto threads = static_cast<uint32_t>(tuning.threads);
  const auto least = static_cast<uint64_t>(threads / 32 * tuning.strips * OPTIM_STRIP);
  uint64_t elements = 0;
  for (size_t slot = first; slot < first + count; ++slot) elements += arrays.slots()[slot].numel;
  const uint64_t larger = std::clamp<uint64_t>(elements / least / most_chunks, 1, kLargerChunks);
  const auto chunk = static_cast<uint32_t>(larger * least);
  tensors.reserve(count);
  for (size_t slot = first; slot < first + count; ++slot) {
    const uint64_t numel = arrays.slots()[slot].numel, chunks = ceil_div<uint64_t>(numel, chunk);
    if (dispatches.empty() || dispatches.back().count == at_most(arrays.arrays()) ||
        dispatches.back().threadgroups + chunks > UINT32_MAX / threads)
      dispatches.push_back({slot, 0, 0, threads, {0, static_cast<uint32_t>(slot), chunk}, arrays.views(slot), nullptr});
    OptimDispatch& dispatch = dispatches.back();
    tensors.push_back({numel, dispatch.threadgroups, tuning.vectors && arrays.aligned16(slot)});
    dispatch.count += 1;
    dispatch.threadgroups += grid_side(static_cast<int64_t>(chunks));
  }
  for (OptimDispatch& dispatch : dispatches) {
    dispatch.grid.tensors = static_cast<uint32_t>(dispatch.count);
    dispatch.tensors = &tensors[dispatch.first - first];
  }
}

uint32_t OptimPlan::threadgroups() const {
  uint64_t sum = 0;
  for (const OptimDispatch& dispatch : dispatches) sum += dispatch.threadgroups;
  return grid_side(static_cast<int64_t>(sum));
}

gpu::Recording& OptimDispatch::begin(gpu::Recording& recording, const std::string& kernel, size_t arrays) const {
  return recording.kernel(kernel).pointers(0, views, count * arrays).bytes(1, tensors, count * sizeof(OptimTensor));
}

std::string plan_reason(const ParameterArrays& arrays) {
  return std::to_string(arrays.slots().size()) + " parameters that are not empty, at most " +
         std::to_string(at_most(arrays.arrays())) + " in a dispatch";
}

void DeviceScalars::check(const char* op, const Tensor& reference) const {
  check_scalar(op, "lr_tensor", lr, reference);
  check_scalar(op, "grad_scale", grad_scale, reference);
  check_scalar(op, "found_inf", found_inf, reference);
}

void DeviceScalars::bind(gpu::Recording& recording, uint32_t index) const {
  const std::array<gpu::BufferView, 3> views = {gpu::view_of(lr), gpu::view_of(grad_scale), gpu::view_of(found_inf)};
  recording.pointers(index, views.data(), views.size());
}

}  // namespace metalcore

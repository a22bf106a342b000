#include "cost.h"

#include <torch/csrc/stable/tensor.h>

#include "slowest_chip.h"

namespace metalcore::gpu {

namespace {

// The part of the chip's arithmetic that a kernel is taken to reach. By `estimate` on this chip, kernels of 12 ops take
// from a tenth of the time that follows to five times as long, which kMostSeconds leaves room for.
constexpr double kReached = 0.1;

// An op that reads memory more or less than once says so: Recording::work.
double bytes_bound(const Recording& recording, const Dispatch& dispatch) {
  double bytes = 0;
  for (const Argument* argument = recording.begin(dispatch); argument != recording.end(dispatch); ++argument) {
    const uint32_t views = argument->kind == Argument::kBuffer     ? 1
                           : argument->kind == Argument::kPointers ? argument->count
                                                                   : 0;
    for (uint32_t i = 0; i < views; ++i) bytes += static_cast<double>(recording.views(*argument)[i].span);
  }
  return bytes;
}

double threadgroups(const Dispatch& dispatch) {
  const auto along = [&](uint32_t grid, uint32_t group) {
    return static_cast<double>(dispatch.threads ? (uint64_t{grid} + group - 1) / group : grid);
  };
  const Size& grid = dispatch.grid;
  const Size& group = dispatch.threadgroup;
  return along(grid.x, group.x) * along(grid.y, group.y) * along(grid.z, group.z);
}

double seconds(const Work& work) {
  return std::max(work.flops / (kReached * slowest_chip::kFlopsPerSecond), work.bytes / slowest_chip::kBytesPerSecond);
}

}  // namespace

int64_t at_once(const Recording& recording, int64_t items, Work each, int64_t multiple) {
  if (!recording.bounds_work()) return items;
  const double most = 0.9 * kMostSeconds / seconds(each);
  if (most >= static_cast<double>(items)) return items;
  return std::max(static_cast<int64_t>(most) / multiple * multiple, multiple);
}

double seconds(const Recording& recording, const Dispatch& dispatch) {
  Work work = dispatch.work;
  if (work.bytes < 0) work.bytes = bytes_bound(recording, dispatch);
  // A core runs whole threadgroups.
  const double cores = std::min<double>(threadgroups(dispatch), slowest_chip::kCores);
  return slowest_chip::kSecondsPerDispatch + seconds(work) * slowest_chip::kCores / cores;
}

BufferView Piece::of(const Tensor& tensor, int64_t elements_each) const {
  return of(view_of(tensor), static_cast<int64_t>(tensor.element_size()) * elements_each);
}

}  // namespace metalcore::gpu

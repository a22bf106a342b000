// info_any(info): not 0 where any matrix of a batch failed, of whose infos one is not 0. It is what functions that
// raise wait for, by one launch or, for more than INFO_BLOCK matrices, two.
#include "../../../kernels/linalg/info.h"
#include "../rows.h"

#include <algorithm>
#include <vector>

namespace metalcore {
namespace {

Tensor info_any(const Tensor& info) {
  check(info.scalar_type() == ScalarType::Int, "metalcore::info_any: info must be int32, not ",
        dtype_name(info.scalar_type()));
  Tensor found = as_contiguous(info);
  const uint32_t threads = std::min<uint32_t>(INFO_THREADS, row_tuning(info).looped_threads);
  do {
    const int64_t count = found.numel(), blocks = std::max<int64_t>(1, ceil_div<int64_t>(count, INFO_BLOCK));
    const std::vector<int64_t> sizes(blocks > 1 ? 1 : 0, blocks);
    const Tensor fewer = new_tensor(sizes, ScalarType::Int, info);
    gpu::record(info, [&](gpu::Recording& recording) {
      recording.kernel("info_any").buffer(0, found).buffer(1, fewer).bytes(2, grid_side(count));
      recording.dispatch_threadgroups({grid_side(blocks)}, {threads});
    });
    found = fewer;
  } while (found.numel() > 1);
  return found;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) { m.def("info_any(Tensor info) -> Tensor"); }

METALCORE_KERNELS(m) { m.impl("info_any", TORCH_BOX(&metalcore::info_any)); }

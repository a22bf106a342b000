// info_any(info) returns a number that is not 0 if an info of the batch is not 0, which means that a matrix failed. The
// functions that raise errors wait for it. It takes one launch, or two for more than INFO_BLOCK matrices.
#include "../../../kernels/linalg/info.h"
#include "../common/rows.h"

#include <algorithm>
#include <vector>

namespace metalcore {
namespace {

Tensor info_any(const Tensor& info) {
  check(info.scalar_type() == ScalarType::Int, "metalcore::info_any: info must be int32, not ",
        dtype_name(info.scalar_type()));
  Tensor infos = as_contiguous(info);
  const uint32_t threads = std::min<uint32_t>(INFO_THREADS, row_tuning(info).looped_threads);
  do {
    const int64_t count = infos.numel(), blocks = std::max<int64_t>(1, ceil_div<int64_t>(count, INFO_BLOCK));
    const std::vector<int64_t> sizes(blocks > 1 ? 1 : 0, blocks);
    const Tensor fewer = new_tensor(sizes, ScalarType::Int, info);
    gpu::record(info, [&](gpu::Recording& recording) {
      recording.kernel("info_any").buffer(0, infos).buffer(1, fewer).bytes(2, grid_side(count));
      recording.dispatch_threadgroups({grid_side(blocks)}, {threads});
    });
    infos = fewer;
  } while (infos.numel() > 1);
  return infos;
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) { m.def("info_any(Tensor info) -> Tensor"); }

METALCORE_KERNELS(m) { m.impl<&metalcore::info_any>("info_any"); }

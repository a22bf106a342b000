// The symmetric rank-k update, for the ops that use it.
#pragma once

#include "../../../kernels/linalg/syrk.h"
#include "../common/common.h"

namespace metalcore {

// Records one dispatch of kernels/linalg/syrk.metal for `batch` matrices, and sets p.tiles.
void record_syrk(gpu::Recording& recording, const gpu::BufferView& a, const gpu::BufferView& c,
                 const gpu::BufferView& result, SyrkParams p, uint32_t batch);

}  // namespace metalcore

// rope in memory that the caller has.
#pragma once

#include "../common/common.h"

namespace metalcore {

// How q and k are rotated. All tensors have four dimensions: heads are dimension 1 or 2, and tokens the other one.
struct Rotation {
  int64_t heads_dim;      // of q and k
  int64_t rotary;         // elements of a head that are rotated
  bool interleaved;       // pairs are neighbours
  int64_t second, third;  // the first pairs of the second and of the third section, or 0 and 0
  bool inverse;
};

// Rotates q and k into q_out and k_out, which are the same tensors `in_place`. `op` is whose plan it notes.
void rotate(const char* op, const Tensor& q, const MaybeTensor& k, const Tensor& q_out, const MaybeTensor& k_out,
            const Tensor& cosine, const Tensor& sine, const MaybeTensor& positions, const Rotation& rotation,
            bool in_place);

}  // namespace metalcore

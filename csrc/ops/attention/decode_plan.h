// Which kernel of kernels/attention/decode*.metal a call takes, and how many threadgroups share its keys.
#pragma once

#include "decode.h"

namespace metalcore::attention {

struct DecodePlan {
  bool matrices;        // the kernel multiplies matrices
  int64_t kernel_size;  // as in the kernel's name
  uint32_t rows;        // of a threadgroup
  int64_t tiles;        // of all rows of a request, or of all requests where they have different lengths
  int64_t splits;
  bool together;  // these run together and merge their results
  uint32_t simdgroups;
  int64_t group, kv_heads;
  int64_t keys;  // of a request, taking all to have the same number where only the device knows it
  bool general;  // there is a mask or a soft cap, or rows that cannot be loaded by vectors, or lie far apart
  bool narrow;
  bool alone;             // later kernels begin when this one has ended
  int64_t lane_keys = 0;  // of a simdgroup whose lanes load the operands of products
};
DecodePlan plan_decode(const DecodeCall& call);

// How the results of `parts` threadgroups become one, for each of `units` of each token: a head, and some elements.
struct MergePlan {
  int64_t team;        // simdgroups that share the parts of a unit
  int64_t simdgroups;  // of a threadgroup, which has one team or more
};
MergePlan plan_merge(const Tensor& out, int64_t units, int64_t tokens, int64_t parts);

// Whether keys and values can be loaded 16 bytes at a time.
bool has_vectors(const DecodeCall& call);

}  // namespace metalcore::attention

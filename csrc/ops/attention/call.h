// What forward and backward have in common: the checked arguments of a call, and the kernels' parameters.
#pragma once

#include "../../../kernels/attention/attention.h"
#include "../../gpu/cost.h"
#include "../../gpu/tuning.h"
#include "../common/common.h"

#include <string>

namespace metalcore::attention {

// The arguments of both operators; metalcore/attention/_operators.py says what they mean.
struct Arguments {
  const Tensor &q, &k, &v;
  const MaybeTensor &mask, &sinks, &cu_seq_q, &cu_seq_k, &seed;
  int64_t max_q, max_k, left, right;
  bool lower_right;
  double scale, softcap, dropout;
};

struct Call {
  Tensor q, k, v;  // elements of a row are neighbours
  MaybeTensor mask, sinks, cu_seq_q, cu_seq_k, seed;
  int64_t batches, heads, k_heads;
  int64_t longest_q, longest_k;
  uint32_t size;  // the head size of the tiled kernels that take the call, or 0
  AttentionParams params;
};

// Throws for arguments that do not go together.
Call call_of(const char* op, const Arguments& arguments);

// Which kernels a call takes: narrow ones have fewer registers (kernels/attention/attention.h).
struct AttentionTuning {
  const char* family;
  bool narrow_forward = false;
  bool narrow_dq = false;   // the gradient of queries
  bool narrow_dkv = false;  // the gradients of keys and values
  bool units = false;       // units that multiply tensors make the results of 16 bits
};
const AttentionTuning& attention_tuning(const Tensor& tensor);

// What comes between a kernel's stem and its head size: "", or the kind of narrow kernel.
std::string kind_of(const Call& call, bool narrow);
// Why it is that kind: "8 queries a simdgroup, …".
std::string kind_text(const Call& call, bool narrow);

// The head size of the kernels for units that take the call, or 0.
uint32_t unit_size(const Call& call);
// What their names have before that size: some know masks, soft caps, and scales that are not above 0.
std::string unit_kind_of(const Call& call);

// Throws if no tiled kernel takes the call's head sizes.
void check_size(const char* op, const Call& call);

// An uninitialized tensor (batch, heads, length, size) whose heads and rows lie in the order of those of `like`.
Tensor new_like_heads(const Tensor& like, int64_t size);

// The tensor itself or a copy, whose rows' elements are neighbours.
Tensor with_dense_rows(const Tensor& tensor);
AttentionStrides strides_of(const Tensor& tensor, bool variable);
// Whether rows of `size` elements begin and end at multiples of 16 bytes.
bool has_vectors(const Tensor& tensor, int64_t size);

// How many of these heads take turns: the longest walks of all of them come first, so that the last ones to begin are
// short. More heads would leave few threadgroups at once that share the keys of one.
uint32_t turns_of(const AttentionParams& params, int64_t heads);

// Records threadgroups of `threads`, which do `flops` each. `bind` names the kernel and binds all except the
// parameters, which are at `index`.
template <typename Bind>
void record_blocks(gpu::Recording& recording, AttentionParams params, int64_t threadgroups, double flops,
                   uint32_t index, uint32_t threads, const Bind& bind) {
  params.turns = turns_of(params, threadgroups / std::max(params.blocks, 1u));
  gpu::in_pieces(recording, threadgroups, {flops, 0}, [&](const gpu::Piece& piece) {
    params.first = grid_side(piece.first);
    bind();
    recording.bytes(index, params).work(piece.work.flops);
    recording.dispatch_threadgroups({grid_side(piece.count)}, {threads});
  });
}

// "head size 80 (values 64) in tiles for 128", where the kernels' size is 128
std::string size_text(const Call& call, uint32_t size);

}  // namespace metalcore::attention

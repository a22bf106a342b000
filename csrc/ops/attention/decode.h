// Attention of few queries to many keys, on kernels/attention/decode.metal: threadgroups share the keys, and a second
// dispatch merges their results. Keys and values of requests lie one after the other, or in pages.
#pragma once

#include "../../../kernels/attention/attention.h"
#include "../common/common.h"

#include <optional>

namespace metalcore::attention {

// The pages of a pool in FlashInfer's terms. The tensors are int32, on the device.
struct Pages {
  Tensor indptr, indices, last_page_len;
  int64_t size;  // keys of a page
};

// Which dimensions of a tensor are which. A batch of requests of one length has all of them. Where requests follow each
// other, `batch` is -1.
struct Dims {
  int batch, head, token;
};
constexpr Dims kHeadsFirst = {0, 1, 2};  // (batch, heads, length, size)
constexpr Dims kTokens = {-1, 1, 0};     // (tokens, heads, size)

struct DecodeCall {
  Tensor q, k, v, out, lse;   // lse: without the last dimension
  Dims query_dims, key_dims;  // of pages: batch is that of the pages
  MaybeTensor mask, sinks;    // the mask: (batch, heads, queries, keys), or one number after the other for pages
  AttentionMaskStrides mask_strides{};
  MaybeTensor mask_indptr;         // where the mask of each request begins, then
  MaybeTensor q_indptr, k_indptr;  // where each request's queries begin, and its keys if they are not in pages
  std::optional<Pages> pages;
  int64_t batch, queries, keys;  // of each request, or of all together where there is an indptr
  int64_t left, right;           // keys before and behind a query that it sees
  bool lower_right;
  double scale, softcap;
};

// Whether there is a kernel for heads of these sizes.
bool decode_has_sizes(int64_t head_size, int64_t value_size);

// Whether to take this kernel and not that of many queries: reading the keys takes longer than computing with them, and
// many threadgroups have to share them.
bool decode_is_better(int64_t queries, int64_t group, int64_t keys);

// Fills call.out and call.lse. `op` is whose plan it notes.
void decode(const char* op, const DecodeCall& call);

// Merges parts (token, part, head, size) with their lse (token, part, head), float32, which `rests` says how to read
// (AttentionMergeParams). `queries` tokens are of each request of out and lse, whose dimensions are as `dims` says.
void record_merge(gpu::Recording& recording, const Tensor& parts, const Tensor& part_lse, const MaybeTensor& sinks,
                  const Tensor& out, const Tensor& lse, Dims dims, int64_t queries, int64_t rests);

// The tensor itself if its last dimension is contiguous, or a contiguous copy.
Tensor with_rows(const Tensor& tensor);
uint32_t number_type(const Tensor& tensor);
DecodeStrides strides_of(const Tensor& tensor, Dims dims);

}  // namespace metalcore::attention

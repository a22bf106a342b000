// Attention over the pages of a cache, in memory that the caller has, and what puts new tokens there.
#pragma once

#include "../attention/decode.h"

namespace metalcore {

// FlashInfer's BatchPrefillWithPagedKVCache and BatchDecodeWithPagedKVCache. Without qo_indptr each request has one
// query. Fills `out` (tokens, heads, size), and lse (tokens, heads) with the natural logarithms of the sums; both are
// contiguous. The caller has checked that q has three dimensions and that the pools go together.
void paged_attention_into(Tensor out, Tensor lse, const Tensor& q, const MaybeTensor& qo_indptr, const Tensor& k,
                          const Tensor& v, const Tensor& kv_indptr, const Tensor& kv_indices,
                          const Tensor& kv_last_page_len, bool heads_first, const MaybeTensor& mask,
                          const MaybeTensor& mask_indptr, const MaybeTensor& sinks, int64_t left, int64_t right,
                          double scale, double softcap);

// FlashInfer's append_paged_kv_cache: token i is number positions[i] of request batch_indices[i].
void paged_append(const Tensor& key, const Tensor& value, const Tensor& batch_indices, const Tensor& positions,
                  const Tensor& k, const Tensor& v, const Tensor& kv_indptr, const Tensor& kv_indices,
                  bool heads_first);

}  // namespace metalcore

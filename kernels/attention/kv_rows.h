// Where the keys and values of a request lie.
//
// Lengths and places of pages are in device memory, so the host has not seen them. They are bounded here: no value of
// theirs leads out of a tensor, and a key whose page does not exist is not seen.
#pragma once

#include <metal_stdlib>

#include "attention/decode.h"

using namespace metal;

struct KeyRows {
  uint length;       // keys of the request
  uint first_page;   // index into kv_indices
  ulong key, value;  // the first key's and value's place in memory, in elements

  KeyRows(uint request, uint kv_head, constant AttentionDecodeParams& params, device const int* kv_indptr,
          device const int* kv_last_page_len)
      : length(params.keys), first_page(0), key(kv_head * params.k.head), value(kv_head * params.v.head) {
    if (params.key_layout == KEYS_EACH) {
      key += request * params.k.batch;
      value += request * params.v.batch;
      return;
    }
    const bool paged = params.key_layout == KEYS_PAGED;
    const int most = static_cast<int>(paged ? params.indices : params.keys);
    const int begin = clamp(kv_indptr[request], 0, most);
    const int end = clamp(kv_indptr[request + 1], begin, most);
    length = static_cast<uint>(end - begin);
    if (!paged) {
      key += begin * params.k.token;
      value += begin * params.v.token;
      return;
    }
    first_page = static_cast<uint>(begin);
    const int last = clamp(kv_last_page_len[request], 0, static_cast<int>(params.page_size));
    if (length) length = (length - 1) * params.page_size + static_cast<uint>(last);
  }

  // Finds key number `i`, which is less than `length`; returns false where it has no page in the pool.
  bool find(uint i, constant AttentionDecodeParams& params, device const int* kv_indices, thread ulong& key_at,
            thread ulong& value_at) const {
    ulong page = 0;
    uint slot = i;
    bool exists = true;
    if (params.key_layout == KEYS_PAGED) {
      const uint number = mulhi(2 * i, params.page_magic) >> params.page_shift;
      const uint index = static_cast<uint>(kv_indices[first_page + number]);
      exists = index < params.pages;
      page = exists ? index : 0;
      slot = i - number * params.page_size;
    }
    key_at = key + page * params.k.batch + slot * params.k.token;
    value_at = value + page * params.v.batch + slot * params.v.token;
    return exists;
  }
};

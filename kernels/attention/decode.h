// What decode.metal and merge.metal, paged/paged_append.metal and their host sides share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Types of numbers that a kernel learns at run time.
#define NUMBER_FLOAT 0u
#define NUMBER_HALF 1u
#define NUMBER_BFLOAT 2u
#define NUMBER_BOOL 3u
#define NUMBER_NONE 4u

// How the keys of requests lie.
#define KEYS_EACH 0u    // as many for each request
#define KEYS_RAGGED 1u  // request i has rows kv_indptr[i] to kv_indptr[i + 1]
#define KEYS_PAGED 2u   // request i has the pages kv_indices[kv_indptr[i]] to kv_indices[kv_indptr[i + 1]]

// Distances in elements: from item to item of a batch, from head to head, from token to token, and from part to part.
struct DecodeStrides {
  int64_t batch, head, token, part;
};

struct AttentionDecodeParams {
  uint32_t batch;     // requests
  uint32_t kv_heads;  // that `group` query heads share each
  uint32_t group;
  uint32_t head_size, value_size;
  uint32_t queries;  // of each request; of all together where they are ragged
  uint32_t keys;     // of each request; of all together where they are ragged
  uint32_t splits;   // threadgroups that share the keys of a tile of rows
  uint32_t ragged;   // request i has the queries from qo_indptr[i] to qo_indptr[i + 1]
  uint32_t key_layout;
  uint32_t first_tile;  // of the dispatch: a long one is made in pieces
  uint32_t pages;       // that the pool has
  uint32_t indices;     // that kv_indices has
  uint32_t page_size;
  uint32_t page_magic, page_shift;  // key / page_size = ((2 * key * page_magic) >> 32) >> page_shift
  uint32_t vectors;                 // rows of keys and values begin and end at multiples of 16 bytes
  uint32_t general;                 // there is a mask or a soft cap, or no vectors, or tokens are far apart
  uint32_t query_type, mask_type, sink_type, out_type;
  uint32_t lower_right;             // the last query stands at the last key; else the first query at the first key
  int32_t left, right;              // keys before and behind a query's place that it sees
  float query_scale;                // what makes log2's scores of products, or what the soft cap's tanh takes
  float softcap;                    // times log2(e), or 0
  DecodeStrides q, k, v, out, lse;  // of k and v: `batch` from page to page
  int64_t mask_batch, mask_head, mask_query, mask_key;
  int64_t mask_first;      // the place of the first query and key; strides may be negative
  uint32_t mask_elements;  // of a mask that holds the queries times the keys of one request after the other
  int64_t rests;           // see AttentionMergeParams; 0 where `lse` takes natural logarithms
};

// Parts that a simdgroup of the merging kernel has at a time.
#define ATTENTION_MERGE_PARTS 8u

// Results of parts of the keys become one. A part's logarithm is a natural one, or if `rests` is not 0, it has base 2
// and is the sum of two numbers, so that it has more bits than float32: that of the largest score, and `rests` elements
// behind it the logarithm of the rest.
struct AttentionMergeParams {
  uint32_t heads, parts, value_size;
  uint32_t queries;  // of each request; tokens are numbered over all of them
  uint32_t out_type, sink_type;
  DecodeStrides in, in_lse;  // by token
  DecodeStrides out, lse;    // by request and token
  int64_t rests;
};

struct PagedAppendParams {
  uint32_t tokens, heads, key_size, value_size;
  uint32_t batch, pages, indices, page_size;
  uint32_t in_type, cache_type;
  DecodeStrides key, value;              // of what is appended
  DecodeStrides key_pages, value_pages;  // `batch` from page to page
};

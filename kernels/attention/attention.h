// Arguments of the attention kernels, shared with the host. Strides and sizes are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The head sizes that kernels have tiles for. Others take the next one.
#define ATTENTION_SIZES 64, 96, 128, 192, 256

// A threadgroup of so many simdgroups has a block of so many rows.
#define ATTENTION_SIMDS 4
#define ATTENTION_DOWN(size) ((size) <= 128 ? 2 : 1)  // fragments of 8 rows that a simdgroup holds
#define ATTENTION_ROWS(size) (8 * ATTENTION_DOWN(size) * ATTENTION_SIMDS)
// The same for the gradients of queries, and of keys and values, of which a simdgroup holds more.
#define ATTENTION_DQ_DOWN(size, bytes) ((size) * (bytes) <= 256 ? 2 : 1)
#define ATTENTION_DQ_ROWS(size, bytes) (8 * ATTENTION_DQ_DOWN(size, bytes) * ATTENTION_SIMDS)
#define ATTENTION_DKV_DOWN(size, bytes) ((size) * (bytes) <= 128 ? 2 : 1)
#define ATTENTION_DKV_ROWS(size, bytes) (8 * ATTENTION_DKV_DOWN(size, bytes) * ATTENTION_SIMDS)
// The rows that it walks over at once: as many as a tile of threadgroup memory has, for elements of `bytes` bytes.
#define ATTENTION_KEYS(size, bytes) \
  ((size) * (bytes) <= 128 ? 64 : (size) * (bytes) <= 256 ? 32 : (size) * (bytes) <= 512 ? 16 : 8)
// The queries that the gradients of keys and values walk over at once. With 16 of 192 elements of 2 bytes, NVIDIA's
// compiler leaves a thread a quarter of its registers.
#define ATTENTION_DKV_QUERIES(size, bytes) ((size) == 192 && (bytes) == 2 ? 32 : ATTENTION_KEYS(size, bytes))

// A threadgroup of a kernel for units that multiply tensors has 16 rows for each simdgroup, and walks over so many keys
// at once, where its compiler's headers have no other number. Small threadgroups that share a GPU's core compute
// weights while others multiply; large ones read keys and values less often.
#define ATTENTION_UNIT_SIZES 64, 128, 256
#define ATTENTION_UNIT_THREADS(size) ((size) <= 128 ? 128 : 256)
#define ATTENTION_UNIT_ROWS(size) (ATTENTION_UNIT_THREADS(size) / 2)
#define ATTENTION_UNIT_FORWARD_THREADS(size) ((size) <= 64 ? 128 : 256)
#define ATTENTION_UNIT_FORWARD_ROWS(size) (ATTENTION_UNIT_FORWARD_THREADS(size) / 2)
#define ATTENTION_UNIT_KEYS(size) ((size) <= 64 ? 128 : 64)
#define ATTENTION_UNIT_MOST_GRADIENTS 128  // elements of the longest heads whose gradients units make

// Narrow kernels are the same for threads with at most 128 registers, as Apple's GPUs have them. A simdgroup has 8
// rows, which stay in threadgroup memory, and loads nothing ahead into registers. Fewer simdgroups share long rows.
#define ATTENTION_NARROW_SIMDS(size, bytes) ((size) * (bytes) <= 512 ? 4 : 2)
#define ATTENTION_NARROW_ROWS(size, bytes) (8 * ATTENTION_NARROW_SIMDS(size, bytes))
#define ATTENTION_NARROW_KEYS(size, bytes) ((size) * (bytes) <= 192 ? 32 : (size) * (bytes) <= 256 ? 16 : 8)
// The same for gradients, whose kernels have rows of two tensors: queries and gradients of results, or keys and values.
#define ATTENTION_NARROW_BOTH_SIMDS(size, bytes) ((size) * (bytes) <= 192 ? 4 : (size) * (bytes) <= 512 ? 2 : 1)
#define ATTENTION_NARROW_BOTH_ROWS(size, bytes) (8 * ATTENTION_NARROW_BOTH_SIMDS(size, bytes))
#define ATTENTION_NARROW_DQ_KEYS(size, bytes) ((size) * (bytes) <= 256 ? 16 : 8)
#define ATTENTION_NARROW_DKV_QUERIES(size, bytes) ((size) * (bytes) <= 128 ? 16 : 8)
// From this size on the gradients of keys and values have a kernel each, with one tile instead of two.
#define ATTENTION_NARROW_SPLIT 128
#define ATTENTION_NARROW_SPLIT_QUERIES(size, bytes) ((size) * (bytes) <= 256 ? 16 : 8)

// A distance in a window that is as good as none. Sequences are shorter.
#define ATTENTION_UNLIMITED (1 << 30)

// How attn_mask is stored.
#define ATTENTION_NO_MASK 0u
#define ATTENTION_BOOL_MASK 1u
#define ATTENTION_ADDED_MASK 2u        // of the queries' dtype
#define ATTENTION_ADDED_FLOAT_MASK 3u  // float32

// Where the vectors of a tensor lie: those of one head and one batch item are `row` apart, and a vector's elements one
// apart. Where sequences have variable lengths, `batch` is 0 and rows of all sequences follow each other.
struct AttentionStrides {
  int64_t batch, head, row;
};
// `first` is the place of the first query and key. Strides may be negative: where a mask has a number for each distance
// of a key and a query, the number is that of key - query.
struct AttentionMaskStrides {
  int64_t batch, head, row, column, first;
};

// Query i sees key j where  i + shift - left <= j <= i + shift + right.  The shift is 0, or if the band is aligned to
// the lower right, the number of keys less that of queries.
struct AttentionBand {
  int32_t left, right;
  uint32_t lower_right;
};

struct AttentionParams {
  AttentionStrides q, k, v, out, rests;
  AttentionStrides d_out, dq, dk, dv;  // of the gradients
  AttentionMaskStrides mask;
  int64_t numbers;  // queries of all heads and batch items
  AttentionBand band;
  uint32_t heads, group;           // of queries; of queries that share a head of keys and values
  uint32_t q_length, k_length;     // without cu_seq_q and cu_seq_k; the length of all sequences together with them
  uint32_t head_size, value_size;  // of queries and keys; of values and results
  uint32_t blocks;                 // of rows, of the longest sequence
  uint32_t turns;                  // heads whose threadgroups take turns; it divides heads times batch items
  uint32_t first;                  // threadgroup of the dispatch: a long dispatch is made in pieces
  uint32_t variable;               // cu_seq_q and cu_seq_k hold where sequences begin
  uint32_t mask_kind;
  uint32_t mask_pairs;  // whether an even key's number and the next one lie together, at a multiple of their size
  uint32_t has_sinks, has_lse_gradient, has_rests;
  uint32_t vectors;  // rows can be loaded 16 bytes at a time
  float scale;
  float product_scale;  // what makes log2's scores of products, or what the soft cap's tanh takes
  float softcap;        // times log2(e), or 0 for none
  uint32_t dropped;     // of 2^32 random numbers, those that drop; 0 for no dropout
  float kept_scale;     // 1 / (1 - dropout_p)
};

// Attention of few queries, and pages: decode.metal, merge.metal and paged/paged_append.metal.
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
  uint32_t queries;   // of each request; of all together where they are ragged
  uint32_t keys;      // of each request; of all together where they are ragged
  uint32_t splits;    // threadgroups that share the keys of a tile of rows
  uint32_t together;  // these threadgroups run together and merge their results
  uint32_t alone;     // later kernels begin when this one has ended
  uint32_t ragged;    // request i has the queries from qo_indptr[i] to qo_indptr[i + 1]
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
  uint32_t split_step;     // 2^32 / splits, or one less
  int64_t rests;           // see AttentionMergeParams; 0 where `lse` takes natural logarithms
};

// Parts that a simdgroup of the merging kernel has at a time.
#define ATTENTION_MERGE_PARTS 8u
// Elements of a value that a team of simdgroups of it has.
#define ATTENTION_MERGE_ELEMENTS 64u

// Results of parts of the keys become one. A part's logarithm is a natural one, or if `rests` is not 0, it has base 2
// and is the sum of two numbers, so that it has more bits than float32: that of the largest score, and `rests` elements
// behind it the logarithm of the rest.
struct AttentionMergeParams {
  uint32_t heads, parts, value_size;
  uint32_t team;     // simdgroups that share the parts
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
